// What attention on CUDA asks for beyond what the CPU's does: every refusal that needs no GPU, with its whole
// message.
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "attention_problem.h"
#include "core/error.h"

namespace dualkv::testing {
namespace {

using core::Concat;

// With a plan for the CPU.
class AttentionOnCudaRefuses : public ::testing::Test {
 protected:
  AttentionOnCudaRefuses()
      : problem_({{6, 2}, {-1, 0}}, {.num_heads = 4, .num_kv_heads = 2}, 1),
        plan_params_(Params<dualkv_plan_params>()),
        params_(problem_.MakeParams().forward) {
    plan_params_.forest = problem_.forest.get();
    params_.device = DUALKV_CUDA;
  }

  dualkv_status SetTiles(int32_t device, int32_t num_heads, int32_t num_kv_heads, int32_t head_dim) {
    return dualkv_plan_set_tiles(&plan_params_, device, num_heads, num_kv_heads, head_dim);
  }
  static void ExpectRefused(dualkv_status status, dualkv_status expected, const std::string& message) {
    EXPECT_EQ(status, expected);
    EXPECT_EQ(dualkv_last_error(), message);
  }
  void ExpectUnsupported(const std::string& message) {
    ExpectRefused(dualkv_attention_forward(&params_), DUALKV_UNSUPPORTED, message);
  }
  void ExpectInvalid(const std::string& message) {
    ExpectRefused(dualkv_attention_forward(&params_), DUALKV_INVALID_ARGUMENT, message);
  }

  AttentionProblem<BFloat16> problem_;
  dualkv_plan_params plan_params_;
  dualkv_attention_params params_;
};

// With a plan that the kernels accept, in builds that have them.
class AttentionKernelsRefuse : public AttentionOnCudaRefuses {
 protected:
  void SetUp() override {
    if (SetTiles(DUALKV_CUDA, 4, 2, 8) == DUALKV_UNSUPPORTED) {
      GTEST_SKIP() << "needs a build with CUDA kernels";
    }
    plan_.emplace(plan_params_);
    image_ = plan_->Image();
    params_.plan = plan_->get();
    params_.device_plan = image_.data();
    params_.device_plan_bytes = image_.size();
  }

  std::optional<Plan> plan_;
  std::vector<std::byte> image_;
};

TEST_F(AttentionOnCudaRefuses, BuildsWithoutKernels) {
  if (SetTiles(DUALKV_CUDA, 4, 2, 8) == DUALKV_OK) {
    GTEST_SKIP() << "needs a build without CUDA kernels";
  }
  const std::string message =
      "this build has no CUDA kernels: install CUDA's compiler (nvcc 12.5 or later) and build dualkv again, "
      "or move the tensors to the CPU";
  ExpectRefused(SetTiles(DUALKV_CUDA, 4, 2, 8), DUALKV_UNSUPPORTED, message);
  ExpectUnsupported(message);
}

TEST_F(AttentionOnCudaRefuses, WideTypes) {
  params_.dtype = DUALKV_FLOAT32;
  ExpectUnsupported("dtype must be DUALKV_BFLOAT16 (2) or DUALKV_FLOAT16 (3) on CUDA, got 1");
  params_.dtype = DUALKV_FLOAT64;
  ExpectUnsupported("dtype must be DUALKV_BFLOAT16 (2) or DUALKV_FLOAT16 (3) on CUDA, got 0");
}

TEST_F(AttentionOnCudaRefuses, HeadDimsWithoutKernel) {
  for (const int32_t head_dim : {36, 136}) {
    const std::string message = Concat("head_dim must be a multiple of 8 up to 128 on CUDA, got ", head_dim);
    params_.head_dim = head_dim;
    ExpectUnsupported(message);
    ExpectRefused(SetTiles(DUALKV_CUDA, 4, 2, head_dim), DUALKV_UNSUPPORTED, message);
    EXPECT_EQ(SetTiles(DUALKV_CPU, 4, 2, head_dim), DUALKV_OK);
  }
}

TEST_F(AttentionOnCudaRefuses, TilesOfNoAttention) {
  auto expect_invalid = [](dualkv_status status, const std::string& message) {
    ExpectRefused(status, DUALKV_INVALID_ARGUMENT, message);
  };
  expect_invalid(SetTiles(2, 4, 2, 8), "device must be DUALKV_CPU (0) or DUALKV_CUDA (1), got 2");
  expect_invalid(SetTiles(DUALKV_CUDA, 4, 0, 8), "num_kv_heads must be >= 1, got 0");
  expect_invalid(SetTiles(DUALKV_CUDA, 4, 3, 8), "num_heads must be a multiple of num_kv_heads, got 4 and 3");
  expect_invalid(SetTiles(DUALKV_CUDA, 4, 2, 0), "head_dim must be 1 to 512, got 0");
  EXPECT_EQ(plan_params_.forward_query_tile, 0) << "nothing is changed";
  expect_invalid(dualkv_plan_set_tiles(nullptr, DUALKV_CUDA, 4, 2, 8), "params must not be NULL");
  plan_params_.size = 3;
  expect_invalid(SetTiles(DUALKV_CUDA, 4, 2, 8),
                 Concat("params.size must be ", sizeof(plan_params_), ", got 3"));
}

TEST_F(AttentionKernelsRefuse, APlanForTheCpu) {
  params_.plan = problem_.plan->get();
  ExpectInvalid(Concat("plan must have the tiles of dualkv_plan_set_tiles, ", plan_params_.forward_query_tile,
                       " x ", plan_params_.forward_key_tile, ", got 64 x 128"));
}

TEST_F(AttentionKernelsRefuse, APlanForOtherHeads) {
  params_.num_kv_heads = 1;
  const dualkv_plan_params kept = plan_params_;
  Check(SetTiles(DUALKV_CUDA, 4, 1, 8));
  ExpectInvalid(Concat("plan must have the tiles of dualkv_plan_set_tiles, ", plan_params_.forward_query_tile,
                       " x ", plan_params_.forward_key_tile, ", got ", kept.forward_query_tile, " x ",
                       kept.forward_key_tile));
}

TEST_F(AttentionKernelsRefuse, ImagesThatAreNone) {
  params_.device_plan = nullptr;
  ExpectInvalid("device_plan must be aligned to 16 bytes and not NULL, got 0");
  params_.device_plan = image_.data() + 8;
  ExpectInvalid(Concat("device_plan must be aligned to 16 bytes and not NULL, got ", params_.device_plan));
  params_.device_plan = image_.data();
  params_.device_plan_bytes = image_.size() - 1;
  ExpectInvalid(Concat("device_plan_bytes must be at least ", image_.size(), ", got ", image_.size() - 1));
}

TEST_F(AttentionKernelsRefuse, MisalignedTensors) {
  const dualkv_attention_params kept = params_;
  for (const auto& [tensor, name] :
       {std::pair{&params_.q, "q"}, {&params_.k, "k"}, {&params_.v, "v"}, {&params_.out, "out"}}) {
    tensor->data = static_cast<char*>(tensor->data) + 8;
    ExpectInvalid(Concat(name, ".data must be aligned to 16 bytes on CUDA, got ", tensor->data));
    params_ = kept;
  }
}

TEST_F(AttentionKernelsRefuse, MisalignedStatistics) {
  auto* const aligned = static_cast<std::byte*>(params_.lse);
  params_.lse = aligned + 2;
  ExpectInvalid(Concat("lse must be aligned to 4 bytes, got ", params_.lse));
  params_.lse = aligned;
  params_.sinks = aligned + 2;
  ExpectInvalid(Concat("sinks must be aligned to 4 bytes, got ", params_.sinks));
}

TEST_F(AttentionKernelsRefuse, StridesThatAreNoneOfATensorMap) {
  const dualkv_attention_params kept = params_;
  for (const auto& [tensor, name] :
       {std::pair{&params_.q, "q"}, {&params_.k, "k"}, {&params_.v, "v"}, {&params_.out, "out"}}) {
    for (const int64_t stride : {int64_t{0}, int64_t{-8}, int64_t{12}, int64_t{1} << 39}) {
      const std::string message =
          Concat("_stride must be a positive multiple of 8 up to 34359738360 on CUDA, got ", stride);
      tensor->row_stride = stride;
      ExpectInvalid(Concat(name, ".row", message));
      params_ = kept;
      tensor->head_stride = stride;
      ExpectInvalid(Concat(name, ".head", message));
      params_ = kept;
    }
  }
}

TEST_F(AttentionKernelsRefuse, TooManyRows) {
  const dualkv_attention_params kept = params_;
  params_.query_rows = int64_t{1} << 31;
  ExpectInvalid("query_rows and key_rows must be at most 2147482623 on CUDA, got 2147483648 and 8");
  params_ = kept;
  params_.key_rows = int64_t{1} << 31;
  ExpectInvalid("query_rows and key_rows must be at most 2147482623 on CUDA, got 8 and 2147483648");
}

}  // namespace
}  // namespace dualkv::testing
