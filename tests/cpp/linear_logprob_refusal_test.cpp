// Every refusal of the linear log-prob functions, with its whole message. Nothing is written.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "linear_logprob_problem.h"

namespace dualkv::testing {
namespace {

class LinearLogprobRefuses : public ::testing::Test {
 protected:
  LinearLogprobRefuses()
      : problem_({.rows = 4, .dim = 3, .vocab = 7, .targets = 4}, 1),
        out_(problem_.PoisonedOutputs()),
        params_(problem_.MakeParams(out_)),
        forward_(params_.forward) {}

  void ExpectBackwardRefused(const std::string& message,
                             dualkv_status status = DUALKV_INVALID_ARGUMENT) const {
    EXPECT_EQ(dualkv_linear_logprob_backward(&params_), status);
    EXPECT_EQ(dualkv_last_error(), message);
    for (const auto* output :
         {&out_.logprob, &out_.entropy, &out_.lse, &out_.dhidden, &out_.dweight, &out_.dbias}) {
      for (const float value : *output) {
        EXPECT_TRUE(std::isnan(value));
      }
    }
  }

  void ExpectForwardRefused(const std::string& message,
                            dualkv_status status = DUALKV_INVALID_ARGUMENT) const {
    EXPECT_EQ(dualkv_linear_logprob_forward(&forward_), status);
    EXPECT_EQ(dualkv_last_error(), message);
    for (const auto* output : {&out_.logprob, &out_.entropy, &out_.lse}) {
      for (const float value : *output) {
        EXPECT_TRUE(std::isnan(value));
      }
    }
  }

  void ExpectRefused(const std::string& message, dualkv_status status = DUALKV_INVALID_ARGUMENT) const {
    ExpectForwardRefused(message, status);
    ExpectBackwardRefused(message, status);
  }

  // Just outside of its range, and far, a size is refused.
  void ExpectRange(int64_t& size, const std::string& name, int64_t least, int64_t most) const {
    const int64_t right = size;
    for (const int64_t wrong : {least - 1, most + 1, int64_t{1} << 62}) {
      size = wrong;
      ExpectRefused(name + " must be " + std::to_string(least) + " to " + std::to_string(most) + ", got " +
                    std::to_string(wrong));
    }
    size = right;
  }

  LogprobProblem<float> problem_;
  LogprobOutputs<float> out_;
  dualkv_linear_logprob_backward_params params_;
  dualkv_linear_logprob_params& forward_;
};

TEST_F(LinearLogprobRefuses, NullStruct) {
  EXPECT_EQ(dualkv_linear_logprob_forward(nullptr), DUALKV_INVALID_ARGUMENT);
  EXPECT_STREQ(dualkv_last_error(), "params must not be NULL");
  EXPECT_EQ(dualkv_linear_logprob_backward(nullptr), DUALKV_INVALID_ARGUMENT);
  EXPECT_STREQ(dualkv_last_error(), "params must not be NULL");
}

TEST_F(LinearLogprobRefuses, WrongVersionOrSizeOfStruct) {
  forward_.version = 9;
  ExpectForwardRefused("params.version must be 1, got 9");
  ExpectBackwardRefused("params.forward.version must be 1, got 9");
  params_.version = 8;
  ExpectBackwardRefused("params.version must be 1, got 8");
  forward_.version = params_.version = DUALKV_ABI_VERSION;
  forward_.size = 3;
  const std::string size = std::to_string(sizeof(dualkv_linear_logprob_params));
  ExpectForwardRefused("params.size must be " + size + ", got 3");
  ExpectBackwardRefused("params.forward.size must be " + size + ", got 3");
}

TEST_F(LinearLogprobRefuses, UnknownDevice) {
  forward_.device = 2;
  ExpectRefused("device must be DUALKV_CPU (0) or DUALKV_CUDA (1), got 2");
}

TEST_F(LinearLogprobRefuses, Cuda) {
  forward_.device = DUALKV_CUDA;
  ExpectRefused(
      "on CUDA logits are multiplied by the caller: see dualkv_linear_logprob_chunk_forward, or move the "
      "tensors to the CPU",
      DUALKV_UNSUPPORTED);
}

TEST_F(LinearLogprobRefuses, UnknownDtype) {
  forward_.dtype = 4;
  ExpectRefused("dtype must be a dualkv_dtype, 0 to 3, got 4");
}

TEST_F(LinearLogprobRefuses, NegativeThreads) {
  forward_.num_threads = -1;
  ExpectRefused("num_threads must be >= 0, got -1");
}

TEST_F(LinearLogprobRefuses, SizesOutOfRange) {
  forward_.hidden_dim = 4;
  constexpr int64_t kMost = int64_t{1} << 56;
  ExpectRange(forward_.hidden_rows, "hidden_rows", 0, kMost / 4);
  ExpectRange(forward_.vocab_size, "vocab_size", 0, kMost / 4);
  ExpectRange(forward_.num_targets, "num_targets", 0, kMost);
  ExpectRange(forward_.hidden_dim, "hidden_dim", 1, kMost);
}

TEST_F(LinearLogprobRefuses, TargetsWithoutRows) {
  forward_.hidden_rows = 0;
  ExpectRefused("hidden_rows must be >= 1 for 4 targets, got 0");
}

TEST_F(LinearLogprobRefuses, TargetsWithoutVocabulary) {
  forward_.vocab_size = 0;
  ExpectRefused("vocab_size must be >= 1 for 4 targets, got 0");
}

TEST_F(LinearLogprobRefuses, TemperatureNotFiniteOrNotPositive) {
  forward_.temperature = 0;
  ExpectRefused("temperature must be finite and > 0, got 0");
  forward_.temperature = -0.5;
  ExpectRefused("temperature must be finite and > 0, got -0.5");
  forward_.temperature = std::numeric_limits<double>::infinity();
  ExpectRefused("temperature must be finite and > 0, got inf");
  forward_.temperature = std::numeric_limits<double>::quiet_NaN();
  ExpectRefused("temperature must be finite and > 0, got nan");
  forward_.temperature = 1e-39;
  ExpectRefused("temperature must be > 0 and so must its inverse in the accumulation type, got 1e-39");
}

TEST_F(LinearLogprobRefuses, SoftcapNotFiniteOrNegative) {
  forward_.softcap = -1;
  ExpectRefused("softcap must be finite and >= 0, got -1");
  forward_.softcap = std::numeric_limits<double>::quiet_NaN();
  ExpectRefused("softcap must be finite and >= 0, got nan");
  forward_.softcap = 1e39;
  ExpectRefused("softcap must be > 0 and so must its inverse in the accumulation type, got 1e+39");
}

TEST_F(LinearLogprobRefuses, NullArrays) {
  const dualkv_linear_logprob_params kept = forward_;
  forward_.hidden = nullptr;
  ExpectRefused("hidden must not be NULL for 4 entries");
  forward_ = kept;
  forward_.weight = nullptr;
  ExpectRefused("weight must not be NULL for 7 entries");
  forward_ = kept;
  forward_.rows = nullptr;
  ExpectRefused("rows must not be NULL for 4 entries");
  forward_ = kept;
  forward_.targets = nullptr;
  ExpectRefused("targets must not be NULL for 4 entries");
  forward_ = kept;
  forward_.entropy = nullptr;
  ExpectRefused("entropy must not be NULL for 4 entries");
  forward_ = kept;
  forward_.logprob = nullptr;
  ExpectForwardRefused("logprob must not be NULL for 4 entries");
  forward_ = kept;
  forward_.lse = nullptr;
  ExpectBackwardRefused("lse must not be NULL for 4 entries");
}

TEST_F(LinearLogprobRefuses, RowOutOfRange) {
  problem_.rows[2] = 4;
  ExpectRefused("rows[2] must be 0 to 3, got 4");
  problem_.rows[2] = -1;
  ExpectRefused("rows[2] must be 0 to 3, got -1");
}

TEST_F(LinearLogprobRefuses, TargetOutOfRange) {
  problem_.targets[1] = 7;
  ExpectRefused("targets[1] must be 0 to 6, or -100 to ignore it, got 7");
  problem_.targets[1] = -1;
  ExpectRefused("targets[1] must be 0 to 6, or -100 to ignore it, got -1");
}

TEST(LinearLogprobAccepts, AnyStrideOfASingleRow) {
  LogprobProblem<float> problem({.rows = 1, .dim = 3, .vocab = 1, .targets = 1}, 2);
  problem.hidden_stride = 0;
  problem.weight_stride = 1;
  EXPECT_EQ(problem.Run().logprob[0], 0);
}

}  // namespace
}  // namespace dualkv::testing
