// A linear log-prob call with its arrays, and a reference that follows the definition target by target.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "dualkv/dualkv.h"
#include "element_types.h"

namespace dualkv::testing {

struct LogprobOptions {
  int64_t rows = 1;     // T
  int64_t dim = 1;      // C
  int64_t vocab = 1;    // V
  int64_t targets = 1;  // M
  bool bias = false;
  double temperature = 1;
  double softcap = 0;
  int64_t gap = 0;     // elements between rows
  double ignored = 0;  // share of the targets
  int32_t num_threads = 1;

  std::string ToString() const {
    std::ostringstream text;
    text << "T " << rows << " C " << dim << " V " << vocab << " M " << targets << " bias " << bias
         << " temperature " << temperature << " softcap " << softcap << " gap " << gap << " ignored "
         << ignored << " threads " << num_threads;
    return text.str();
  }
};

// Outputs of a forward and a backward.
template <class Element>
struct LogprobOutputs {
  using T = typename Type<Element>::Accumulator;
  std::vector<T> logprob, entropy, lse;
  std::vector<Element> dhidden, dweight, dbias;
};

template <class Element>
struct LogprobProblem {
  using T = typename Type<Element>::Accumulator;

  // Random inputs. Whatever must not be read is NaN: gaps between rows, rows without targets, upstream
  // gradients of ignored targets.
  LogprobProblem(const LogprobOptions& options, uint64_t seed)
      : options(options),
        hidden_stride(options.dim + options.gap),
        weight_stride(options.dim + 2 * options.gap),
        hidden(options.rows * hidden_stride, Nan<Element>()),
        weight(options.vocab * weight_stride, Nan<Element>()),
        bias(options.vocab),
        rows(options.targets),
        targets(options.targets),
        dlogprob(options.targets),
        dentropy(options.targets) {
    std::mt19937_64 rng(seed);
    std::normal_distribution<double> normal;
    for (int64_t m = 0; m < options.targets; ++m) {
      rows[m] = std::uniform_int_distribution<int64_t>(0, options.rows - 1)(rng);
      targets[m] = std::uniform_int_distribution<int64_t>(0, options.vocab - 1)(rng);
      dlogprob[m] = static_cast<T>(normal(rng));
      dentropy[m] = static_cast<T>(normal(rng));
      if (std::bernoulli_distribution(options.ignored)(rng)) {
        targets[m] = DUALKV_IGNORE_TARGET;
        dlogprob[m] = dentropy[m] = Nan<T>();
        continue;
      }
      for (int64_t c = 0; c < options.dim; ++c) {
        Convert(normal(rng), hidden[rows[m] * hidden_stride + c]);
      }
    }
    for (int64_t v = 0; v < options.vocab; ++v) {
      for (int64_t c = 0; c < options.dim; ++c) {
        Convert(2 * normal(rng) / std::sqrt(static_cast<double>(options.dim)), weight[v * weight_stride + c]);
      }
      Convert(normal(rng), bias[v]);
    }
  }

  template <class Value>
  static Value Nan() {
    Value nan;
    Convert(std::numeric_limits<double>::quiet_NaN(), nan);
    return nan;
  }

  LogprobOutputs<Element> PoisonedOutputs() const {
    const auto m = options.targets;
    const auto poison = [](int64_t count) { return std::vector<Element>(count, Nan<Element>()); };
    return {.logprob = std::vector<T>(m, Nan<T>()),
            .entropy = std::vector<T>(m, Nan<T>()),
            .lse = std::vector<T>(m, Nan<T>()),
            .dhidden = poison(options.rows * options.dim),
            .dweight = poison(options.vocab * options.dim),
            .dbias = poison(options.vocab)};
  }

  // Parameters with everything wanted. params.forward is for the forward.
  dualkv_linear_logprob_backward_params MakeParams(LogprobOutputs<Element>& out) const {
    const dualkv_linear_logprob_params forward = {.size = sizeof(dualkv_linear_logprob_params),
                                                  .version = DUALKV_ABI_VERSION,
                                                  .device = DUALKV_CPU,
                                                  .dtype = Type<Element>::kDtype,
                                                  .num_threads = options.num_threads,
                                                  .reserved = 0,
                                                  .hidden_rows = options.rows,
                                                  .hidden_dim = options.dim,
                                                  .vocab_size = options.vocab,
                                                  .num_targets = options.targets,
                                                  .hidden = hidden.data(),
                                                  .hidden_row_stride = hidden_stride,
                                                  .weight = weight.data(),
                                                  .weight_row_stride = weight_stride,
                                                  .bias = options.bias ? bias.data() : nullptr,
                                                  .rows = rows.data(),
                                                  .targets = targets.data(),
                                                  .temperature = options.temperature,
                                                  .softcap = options.softcap,
                                                  .logprob = out.logprob.data(),
                                                  .entropy = out.entropy.data(),
                                                  .lse = out.lse.data()};
    return {.size = sizeof(dualkv_linear_logprob_backward_params),
            .version = DUALKV_ABI_VERSION,
            .forward = forward,
            .dlogprob = dlogprob.data(),
            .dentropy = dentropy.data(),
            .dhidden = out.dhidden.data(),
            .dweight = out.dweight.data(),
            .dbias = out.dbias.data()};
  }

  // Forward and backward.
  LogprobOutputs<Element> Run() const {
    LogprobOutputs<Element> out = PoisonedOutputs();
    const auto params = MakeParams(out);
    EXPECT_EQ(dualkv_linear_logprob_forward(&params.forward), DUALKV_OK) << dualkv_last_error();
    EXPECT_EQ(dualkv_linear_logprob_backward(&params), DUALKV_OK) << dualkv_last_error();
    return out;
  }

  LogprobOptions options;
  int64_t hidden_stride, weight_stride;
  std::vector<Element> hidden, weight, bias;
  std::vector<int64_t> rows, targets;
  std::vector<T> dlogprob, dentropy;
};

// Results in Real, and for each gradient the largest sum of absolute terms of an element, which rounding
// errors scale with.
template <class Real>
struct LogprobReference {
  std::vector<Real> logprob, entropy, lse, dhidden, dweight, dbias;
  Real dhidden_terms = 0, dweight_terms = 0, dbias_terms = 0;
};

template <class Real, class Element>
LogprobReference<Real> ReferenceLogprob(const LogprobProblem<Element>& p) {
  const LogprobOptions& o = p.options;
  const auto value = [](const auto& x) { return static_cast<Real>(ToDouble(x)); };
  const auto softcap = static_cast<Real>(o.softcap), temperature = static_cast<Real>(o.temperature);
  LogprobReference<Real> r;
  for (auto* results : {&r.logprob, &r.entropy, &r.lse}) {
    results->resize(o.targets);
  }
  r.dhidden.resize(o.rows * o.dim);
  r.dweight.resize(o.vocab * o.dim);
  r.dbias.resize(o.vocab);
  std::vector<Real> hidden_terms(r.dhidden.size()), weight_terms(r.dweight.size()), bias_terms(o.vocab);
  std::vector<Real> logits(o.vocab), slopes(o.vocab);

  for (int64_t m = 0; m < o.targets; ++m) {
    const int64_t target = p.targets[m];
    if (target == DUALKV_IGNORE_TARGET) {
      continue;
    }
    const Element* hidden = p.hidden.data() + p.rows[m] * p.hidden_stride;
    for (int64_t v = 0; v < o.vocab; ++v) {
      Real x = 0;
      for (int64_t c = 0; c < o.dim; ++c) {
        x += value(hidden[c]) * value(p.weight[v * p.weight_stride + c]);
      }
      x += o.bias ? value(p.bias[v]) : Real(0);
      const Real tanh = softcap > 0 ? std::tanh(x / softcap) : Real(0);
      logits[v] = (softcap > 0 ? softcap * tanh : x) / temperature;
      slopes[v] = (1 - tanh * tanh) / temperature;
    }
    const Real max = *std::max_element(logits.begin(), logits.end());
    Real sum = 0, entropy = 0;
    for (const Real logit : logits) {
      sum += std::exp(logit - max);
    }
    const Real lse = max + std::log(sum);
    for (const Real logit : logits) {
      entropy -= std::exp(logit - lse) * (logit - lse);
    }
    r.logprob[m] = logits[target] - lse;
    r.entropy[m] = entropy;
    r.lse[m] = lse;

    const Real dlogprob = value(p.dlogprob[m]), dentropy = value(p.dentropy[m]);
    for (int64_t v = 0; v < o.vocab; ++v) {
      const Real log_p = logits[v] - lse, prob = std::exp(log_p), one = v == target ? 1 : 0;
      const Real gradient = (dlogprob * (one - prob) - dentropy * prob * (log_p + entropy)) * slopes[v];
      const Real terms =
          (std::abs(dlogprob) * (one + prob) + std::abs(dentropy) * prob * (std::abs(log_p) + entropy)) *
          slopes[v];
      r.dbias[v] += gradient;
      bias_terms[v] += terms;
      for (int64_t c = 0; c < o.dim; ++c) {
        const Real w = value(p.weight[v * p.weight_stride + c]), h = value(hidden[c]);
        r.dhidden[p.rows[m] * o.dim + c] += gradient * w;
        hidden_terms[p.rows[m] * o.dim + c] += terms * std::abs(w);
        r.dweight[v * o.dim + c] += gradient * h;
        weight_terms[v * o.dim + c] += terms * std::abs(h);
      }
    }
  }
  const auto largest = [](const std::vector<Real>& terms) {
    return terms.empty() ? Real(0) : *std::max_element(terms.begin(), terms.end());
  };
  r.dhidden_terms = largest(hidden_terms);
  r.dweight_terms = largest(weight_terms);
  r.dbias_terms = largest(bias_terms);
  return r;
}

// The error is at most twice that of the plain computation in the accumulation type, rounding of the result
// included, plus what the rounding of logits and of their lse does to probabilities: they are below 16 here,
// so that half a unit in the last place of each is a relative error of 8 epsilon.
template <class Value, class Plain>
void ExpectWithinBudget(const char* name, const std::vector<Value>& got, const std::vector<Plain>& plain,
                        const std::vector<long double>& oracle, long double terms) {
  ASSERT_EQ(got.size(), oracle.size()) << name;
  long double error = 0, plain_error = 0, largest = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double value = ToDouble(got[i]);
    ASSERT_TRUE(std::isfinite(value)) << name << "[" << i << "] is " << value;
    error = std::max(error, std::abs(value - oracle[i]));
    plain_error = std::max(plain_error, std::abs(plain[i] - oracle[i]));
    largest = std::max(largest, std::abs(oracle[i]));
  }
  EXPECT_LE(error, 2 * (plain_error + Type<Value>::kEpsilon * largest) + 16 * Type<Plain>::kEpsilon * terms)
      << name << ", plain error " << plain_error << ", largest " << largest << ", terms " << terms;
}

template <class Element>
void ExpectLikeOracle(const LogprobProblem<Element>& problem, const LogprobOutputs<Element>& got) {
  const auto oracle = ReferenceLogprob<long double>(problem);
  const auto plain = ReferenceLogprob<typename Type<Element>::Accumulator>(problem);
  ExpectWithinBudget("logprob", got.logprob, plain.logprob, oracle.logprob, 1);
  ExpectWithinBudget("entropy", got.entropy, plain.entropy, oracle.entropy, 1);
  ExpectWithinBudget("lse", got.lse, plain.lse, oracle.lse, 1);
  ExpectWithinBudget("dhidden", got.dhidden, plain.dhidden, oracle.dhidden, oracle.dhidden_terms);
  ExpectWithinBudget("dweight", got.dweight, plain.dweight, oracle.dweight, oracle.dweight_terms);
  ExpectWithinBudget("dbias", got.dbias, plain.dbias, oracle.dbias, oracle.dbias_terms);
}

}  // namespace dualkv::testing
