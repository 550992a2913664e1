// Every refusal of the functions for chunks of logits, which need no GPU for it, with its whole message.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "core/error.h"
#include "dualkv/dualkv.hpp"

namespace dualkv::testing {
namespace {

using core::Concat;

// A chunk of 2 rows and 5 entries out of 12, in memory of the host: it is not looked at.
class LogprobChunkRefuses : public ::testing::Test {
 protected:
  LogprobChunkRefuses()
      : params_(Params<dualkv_linear_logprob_chunk_backward_params>()), forward_(params_.forward) {
    forward_.device = DUALKV_CUDA;
    forward_.dtype = DUALKV_BFLOAT16;
    forward_.num_rows = 2;
    forward_.vocab_size = 12;
    forward_.vocab_begin = 4;
    forward_.vocab_count = 5;
    forward_.logits = reinterpret_cast<float*>(memory_.data());
    forward_.logits_row_stride = 8;
    forward_.bias = memory_.data();
    forward_.temperature = 1;
    for (auto* integers : {&forward_.target_ranges, &forward_.targets, &forward_.target_index}) {
      *integers = reinterpret_cast<const int64_t*>(memory_.data());
    }
    for (auto* floats : {&forward_.statistics, &forward_.logprob, &forward_.entropy, &forward_.lse}) {
      *floats = forward_.logits;
    }
    params_.dlogprob = params_.dentropy = forward_.logits;
  }

  void ExpectForwardRefused(const std::string& message, dualkv_status status = DUALKV_INVALID_ARGUMENT) {
    EXPECT_EQ(dualkv_linear_logprob_chunk_forward(&forward_), status);
    EXPECT_EQ(dualkv_last_error(), message);
  }
  void ExpectBackwardRefused(const std::string& message, dualkv_status status = DUALKV_INVALID_ARGUMENT) {
    EXPECT_EQ(dualkv_linear_logprob_chunk_backward(&params_), status);
    EXPECT_EQ(dualkv_last_error(), message);
  }
  void ExpectRefused(const std::string& message, dualkv_status status = DUALKV_INVALID_ARGUMENT) {
    ExpectForwardRefused(message, status);
    ExpectBackwardRefused(message, status);
  }

  alignas(16) std::array<std::byte, 64> memory_{};
  dualkv_linear_logprob_chunk_backward_params params_;
  dualkv_linear_logprob_chunk_params& forward_;
};

template <class Pointer>
Pointer Moved(Pointer pointer, int bytes) {
  return reinterpret_cast<Pointer>(reinterpret_cast<uintptr_t>(pointer) + bytes);
}

TEST_F(LogprobChunkRefuses, NullStruct) {
  EXPECT_EQ(dualkv_linear_logprob_chunk_forward(nullptr), DUALKV_INVALID_ARGUMENT);
  EXPECT_STREQ(dualkv_last_error(), "params must not be NULL");
  EXPECT_EQ(dualkv_linear_logprob_chunk_backward(nullptr), DUALKV_INVALID_ARGUMENT);
  EXPECT_STREQ(dualkv_last_error(), "params must not be NULL");
}

TEST_F(LogprobChunkRefuses, WrongVersionOrSizeOfStruct) {
  forward_.version = 9;
  ExpectForwardRefused("params.version must be 1, got 9");
  ExpectBackwardRefused("params.forward.version must be 1, got 9");
  params_.size = 3;
  ExpectBackwardRefused(Concat("params.size must be ", sizeof(params_), ", got 3"));
}

TEST_F(LogprobChunkRefuses, DevicesOtherThanCuda) {
  forward_.device = 2;
  ExpectRefused("device must be DUALKV_CPU (0) or DUALKV_CUDA (1), got 2");
  forward_.device = DUALKV_CPU;
  ExpectRefused("chunks of logits are for CUDA: on the CPU call dualkv_linear_logprob_forward",
                DUALKV_UNSUPPORTED);
}

TEST_F(LogprobChunkRefuses, TypesWithoutKernel) {
  forward_.dtype = 4;
  ExpectRefused("dtype must be a dualkv_dtype, 0 to 3, got 4");
  forward_.dtype = DUALKV_FLOAT64;
  ExpectRefused("dtype must not be DUALKV_FLOAT64 (0) on CUDA, got 0", DUALKV_UNSUPPORTED);
}

TEST_F(LogprobChunkRefuses, NumbersOfRows) {
  forward_.num_rows = -1;
  ExpectRefused("num_rows must be 0 to 2147483647, got -1");
  forward_.num_rows = int64_t{1} << 31;
  ExpectRefused("num_rows must be 0 to 2147483647, got 2147483648");
}

TEST_F(LogprobChunkRefuses, EntriesOutOfTheVocabulary) {
  forward_.vocab_begin = -4;
  ExpectRefused("vocab_begin must be 0 to 12, got -4");
  forward_.vocab_begin = 13;
  ExpectRefused("vocab_begin must be 0 to 12, got 13");
  forward_.vocab_begin = 8;
  ExpectRefused("vocab_count must be 0 to 4, got 5");
  forward_.vocab_count = -1;
  ExpectRefused("vocab_count must be 0 to 4, got -1");
  forward_.vocab_size = -1;
  ExpectRefused("vocab_size must be >= 0, got -1");
  forward_.vocab_size = int64_t{1} << 40;
  forward_.vocab_count = forward_.logits_row_stride = (int64_t{1} << 30) + 4;
  ExpectRefused("vocab_count must be 0 to 1073741824, got 1073741828");
}

TEST_F(LogprobChunkRefuses, TemperatureAndSoftcap) {
  forward_.temperature = 0;
  ExpectRefused("temperature must be finite and > 0, got 0");
  forward_.temperature = std::numeric_limits<double>::quiet_NaN();
  ExpectRefused("temperature must be finite and > 0, got nan");
  forward_.temperature = 1e-39;
  ExpectRefused("temperature must be > 0 and so must its inverse in the accumulation type, got 1e-39");
  forward_.temperature = 1;
  forward_.softcap = -1;
  ExpectRefused("softcap must be finite and >= 0, got -1");
}

TEST_F(LogprobChunkRefuses, RowsThatOverlapOrAreNotAligned) {
  for (const int64_t stride : {4, 6}) {
    forward_.logits_row_stride = stride;
    ExpectRefused(Concat("logits_row_stride must be a multiple of 4 and at least 5, got ", stride));
  }
}

TEST_F(LogprobChunkRefuses, MissingArrays) {
  const dualkv_linear_logprob_chunk_params kept = forward_;
  auto refuse = [&](auto& array, const char* name, bool in_backward) {
    array = nullptr;
    const std::string message = Concat(name, " must not be NULL for 2 entries");
    ExpectForwardRefused(message);
    if (in_backward) {
      ExpectBackwardRefused(message);
    }
    forward_ = kept;
  };
  refuse(forward_.logits, "logits", true);
  refuse(forward_.target_ranges, "target_ranges", true);
  refuse(forward_.targets, "targets", true);
  refuse(forward_.target_index, "target_index", true);
  refuse(forward_.entropy, "entropy", true);
  refuse(forward_.lse, "lse", true);
  refuse(forward_.statistics, "statistics", false);
  refuse(forward_.logprob, "logprob", false);
}

TEST_F(LogprobChunkRefuses, MisalignedArrays) {
  const dualkv_linear_logprob_chunk_params kept = forward_;
  auto refuse = [&](auto& array, const char* name, int bytes, bool in_backward = true) {
    array = Moved(array, bytes / 2);
    const std::string message =
        Concat(name, " must be aligned to ", bytes, " bytes, got ", static_cast<const void*>(array));
    ExpectForwardRefused(message);
    if (in_backward) {
      ExpectBackwardRefused(message);
    }
    forward_ = kept;
  };
  refuse(forward_.logits, "logits", 16);
  refuse(forward_.bias, "bias", 2);
  refuse(forward_.target_ranges, "target_ranges", 8);
  refuse(forward_.targets, "targets", 8);
  refuse(forward_.target_index, "target_index", 8);
  refuse(forward_.entropy, "entropy", 4);
  refuse(forward_.lse, "lse", 4);
  refuse(forward_.statistics, "statistics", 4, false);
  refuse(forward_.logprob, "logprob", 4, false);
  params_.dlogprob = Moved(params_.dlogprob, 2);
  ExpectBackwardRefused(
      Concat("dlogprob must be aligned to 4 bytes, got ", static_cast<const void*>(params_.dlogprob)));
  params_.dlogprob = nullptr;
  params_.dentropy = Moved(params_.dentropy, 2);
  ExpectBackwardRefused(
      Concat("dentropy must be aligned to 4 bytes, got ", static_cast<const void*>(params_.dentropy)));
}

TEST_F(LogprobChunkRefuses, BuildsWithoutKernels) {
  auto plan_params = Params<dualkv_plan_params>();
  if (dualkv_plan_set_tiles(&plan_params, DUALKV_CUDA, 1, 1, 64) == DUALKV_OK) {
    GTEST_SKIP() << "needs a build without CUDA kernels";
  }
  ExpectRefused(
      "this build has no CUDA kernels: install CUDA's compiler (nvcc 12.5 or later) and build dualkv again, "
      "or move the tensors to the CPU",
      DUALKV_UNSUPPORTED);
}

}  // namespace
}  // namespace dualkv::testing
