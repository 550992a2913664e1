// Log-probabilities, entropies and their gradients from chunks of logits that the caller has multiplied.
//
// A block takes a row of the chunk: its sums have one order, whatever the other rows are, and its threads
// meet only to join their sums. Both kernels do as long as it takes to read the logits, and the backward to
// write half as many bytes. docs/linear_logprob.md has the arithmetic.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/launch.h"
#include "cuda/linear_logprob.h"
#include "cuda/ptx/warpgroup.cuh"

namespace dualkv::cuda {
namespace linear_logprob {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kVector = 4;   // logits of an access of 16 bytes
constexpr int kVectors = 4;  // that a thread holds at a time
constexpr int kStep = kThreads * kVectors * kVector;

struct Params {
  float* logits;  // [R, count]
  int64_t row_stride;
  int64_t vocab_size;
  int64_t vocab_begin;
  int32_t count;
  const void* bias;  // [count], or null
  float inverse_temperature;
  float softcap;
  float inverse_softcap;
  const int64_t* target_ranges;  // [R, 2]
  const int64_t* targets;
  const int64_t* target_index;
  float* statistics;      // [R, 3]
  float* logprob;         // [M]
  float* entropy;         // [M]
  float* lse;             // [M]
  const float* dlogprob;  // [M], or null
  const float* dentropy;  // [M], or null
};

struct Logit {
  float value;
  float slope;  // its derivative with respect to the product
};

// Of a product, its bias included.
template <bool kSoftcap>
__device__ __forceinline__ Logit LogitOf(const Params& params, float x) {
  float slope = params.inverse_temperature;
  if constexpr (kSoftcap) {
    const float tanh = tanhf(x * params.inverse_softcap);
    x = tanh * params.softcap;
    slope *= fmaf(-tanh, tanh, 1.0f);
  }
  return {x * params.inverse_temperature, slope};
}

template <class Element>
__device__ __forceinline__ float BiasOf(const Params& params, int32_t v) {
  return static_cast<float>(static_cast<const Element*>(params.bias)[v]);
}

// The first entry of vector j of this thread in the step at `base`. Neighbours read neighbouring vectors.
__device__ __forceinline__ int32_t EntryOf(int32_t base, int j) {
  return base + (j * kThreads + static_cast<int32_t>(threadIdx.x)) * kVector;
}

// Products of a step of a row, as a thread holds them. Those past the end of the row are of no meaning.
struct Products {
  float4 vectors[kVectors];

  __device__ __forceinline__ Products(const float* row, int32_t base, int32_t count) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int32_t v = EntryOf(base, j);
      vectors[j] = v < count ? *reinterpret_cast<const float4*>(row + v) : float4{};
    }
  }

  // x: vector j, at entry v, with the bias.
  template <class Element>
  __device__ __forceinline__ void Get(const Params& params, int j, int32_t v, float (&x)[kVector]) const {
    x[0] = vectors[j].x;
    x[1] = vectors[j].y;
    x[2] = vectors[j].z;
    x[3] = vectors[j].w;
    if (params.bias != nullptr) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        x[i] += v + i < params.count ? BiasOf<Element>(params, v + i) : 0.0f;
      }
    }
  }
};

// x, or -1000 if x is less. exp is 0 there, and so is its product with x, be that -inf.
__device__ __forceinline__ float AtLeastExpIsZero(float x) { return x < -1000.0f ? -1000.0f : x; }

__device__ __forceinline__ float WarpMax(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, distance));
  }
  return x;
}

// The same bits in all lanes.
__device__ __forceinline__ float WarpSum(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(0xffffffff, x, distance);
  }
  return x;
}

// Softmax over part of a row, with e = exp(logit - max).
struct Softmax {
  float max = -FLT_MAX;
  float sum = 0.0f;     // of e
  float moment = 0.0f;  // of e (logit - max)

  __device__ __forceinline__ void RaiseMax(float new_max) {
    const float shift = AtLeastExpIsZero(max - new_max);
    const float rescale = expf(shift);
    moment = rescale * fmaf(sum, shift, moment);
    sum *= rescale;
    max = new_max;
  }

  // Of a logit that is at most max.
  __device__ __forceinline__ void Add(float logit) {
    const float shift = AtLeastExpIsZero(logit - max);
    const float e = expf(shift);
    sum += e;
    moment = fmaf(e, shift, moment);
  }

  __device__ __forceinline__ void Join(Softmax other) {
    const float top = fmaxf(max, other.max);
    RaiseMax(top);
    other.RaiseMax(top);
    sum += other.sum;
    moment += other.moment;
  }
};

// Of the whole block, for all its threads. Called once.
__device__ __forceinline__ Softmax JoinBlock(Softmax own) {
  __shared__ float maxima[kWarps];
  __shared__ float2 sums[kWarps];
  const int warp = threadIdx.x / 32;
  const float warp_max = WarpMax(own.max);
  if (threadIdx.x % 32 == 0) {
    maxima[warp] = warp_max;
  }
  __syncthreads();
  float top = maxima[0];
  for (int i = 1; i < kWarps; ++i) {
    top = fmaxf(top, maxima[i]);
  }
  own.RaiseMax(top);
  const float2 warp_sums = {WarpSum(own.sum), WarpSum(own.moment)};
  if (threadIdx.x % 32 == 0) {
    sums[warp] = warp_sums;
  }
  __syncthreads();
  Softmax whole = {top, sums[0].x, sums[0].y};
  for (int i = 1; i < kWarps; ++i) {
    whole.sum += sums[i].x;
    whole.moment += sums[i].y;
  }
  return whole;
}

template <class Element, bool kSoftcap>
__global__ void __launch_bounds__(kThreads) Forward(const __grid_constant__ Params params) {
  const int64_t row = blockIdx.x;
  const int64_t target_begin = params.target_ranges[2 * row];
  const int64_t target_end = params.target_ranges[2 * row + 1];
  const float* logits = params.logits + row * params.row_stride;
  Products products(logits, 0, params.count);  // on their way while the row is looked up
  if (target_begin >= target_end) {
    return;
  }

  Softmax own;
  for (int32_t base = 0; base < params.count; base += kStep) {
    float values[kVectors][kVector];
    float top = own.max;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int32_t v = EntryOf(base, j);
      products.Get<Element>(params, j, v, values[j]);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float logit = LogitOf<kSoftcap>(params, values[j][i]).value;
        values[j][i] = v + i < params.count ? logit : -INFINITY;
        top = fmaxf(top, values[j][i]);
      }
    }
    own.RaiseMax(top);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        own.Add(values[j][i]);
      }
    }
    products = Products(logits, base + kStep, params.count);
  }
  Softmax whole = JoinBlock(own);

  // A target keeps its thread, which leaves the logit in logprob until the last chunk.
  for (int64_t t = target_begin + threadIdx.x; t < target_end; t += kThreads) {
    const int64_t v = params.targets[t] - params.vocab_begin;
    if (v >= 0 && v < params.count) {
      const auto entry = static_cast<int32_t>(v);
      const float bias = params.bias != nullptr ? BiasOf<Element>(params, entry) : 0.0f;
      params.logprob[params.target_index[t]] = LogitOf<kSoftcap>(params, logits[entry] + bias).value;
    }
  }

  const bool last = params.vocab_begin + params.count == params.vocab_size;
  if (!last && threadIdx.x > 0) {
    return;
  }
  float* statistics = params.statistics + 3 * row;
  if (params.vocab_begin > 0) {
    Softmax before = {statistics[0], statistics[1], statistics[2]};
    before.Join(whole);
    whole = before;
  }
  if (!last) {
    statistics[0] = whole.max;
    statistics[1] = whole.sum;
    statistics[2] = whole.moment;
    return;
  }
  const float log_sum = logf(whole.sum);
  for (int64_t t = target_begin + threadIdx.x; t < target_end; t += kThreads) {
    const int64_t m = params.target_index[t];
    const bool exists = params.targets[t] >= 0 && params.targets[t] < params.vocab_size;
    params.logprob[m] = exists ? (params.logprob[m] - whole.max) - log_sum : NAN;
    params.entropy[m] = log_sum - whole.moment / whole.sum;
    params.lse[m] = whole.max + log_sum;
  }
}

// The first place in [begin, end) whose target is not less than `target`.
__device__ __forceinline__ int64_t LowerBound(const int64_t* targets, int64_t begin, int64_t end,
                                              int64_t target) {
  while (begin < end) {
    const int64_t middle = (begin + end) / 2;
    if (targets[middle] < target) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

// Four neighbouring elements of dlogits.
template <class Element>
struct PackedVector {
  uint2 bits;
  __device__ __forceinline__ explicit PackedVector(const float (&x)[kVector])
      : bits{ptx::Pack<Element>(x[0], x[1]), ptx::Pack<Element>(x[2], x[3])} {}
};
template <>
struct PackedVector<float> {
  float4 bits;
  __device__ __forceinline__ explicit PackedVector(const float (&x)[kVector])
      : bits{x[0], x[1], x[2], x[3]} {}
};

// With p = exp(s - lse), the gradient of a row's logit s_v is
//
//   ds_v = -p_v (G + E (s_v - lse + H)) + sum of the dlogprob of its targets v
//
// where G and E are the sums of dlogprob and dentropy over the row's targets and H is the entropy.
struct RowGradient {
  float lse;
  float entropy;
  float dlogprob = 0.0f;  // G
  float dentropy = 0.0f;  // E

  // Each warp adds up by itself, in the same order.
  __device__ __forceinline__ RowGradient(const Params& params, int64_t target_begin, int64_t target_end) {
    const int64_t any = params.target_index[target_begin];
    lse = params.lse[any];
    entropy = params.entropy[any];
    for (int64_t t = target_begin + threadIdx.x % 32; t < target_end; t += 32) {
      const int64_t m = params.target_index[t];
      dlogprob += params.dlogprob != nullptr ? params.dlogprob[m] : 0.0f;
      dentropy += params.dentropy != nullptr ? params.dentropy[m] : 0.0f;
    }
    dlogprob = WarpSum(dlogprob);
    dentropy = WarpSum(dentropy);
  }

  // The first term of ds_v.
  __device__ __forceinline__ float OfLogit(float logit) const {
    const float log_p = AtLeastExpIsZero(logit - lse);
    return -expf(log_p) * fmaf(dentropy, log_p + entropy, dlogprob);
  }
};

// dlogits take the place of the logits. A block has read a step before it writes that step's results, which
// end before the next step's logits begin.
template <class Element, bool kSoftcap>
__global__ void __launch_bounds__(kThreads) Backward(const __grid_constant__ Params params) {
  const int64_t row = blockIdx.x;
  const int64_t target_begin = params.target_ranges[2 * row];
  const int64_t target_end = params.target_ranges[2 * row + 1];
  const float* logits = params.logits + row * params.row_stride;
  auto* gradients = reinterpret_cast<PackedVector<Element>*>(params.logits + row * params.row_stride);
  Products products(logits, 0, params.count);
  if (target_begin >= target_end) {
    const float zeros[kVector] = {};
    for (int32_t v = threadIdx.x * kVector; v < params.count; v += kThreads * kVector) {
      gradients[v / kVector] = PackedVector<Element>(zeros);
    }
    return;
  }
  const RowGradient of_row(params, target_begin, target_end);
  // The row's targets in the chunk, with a gradient.
  const int64_t chunk_begin = LowerBound(params.targets, target_begin, target_end, params.vocab_begin);
  const int64_t chunk_end = params.dlogprob == nullptr ? chunk_begin
                                                       : LowerBound(params.targets, chunk_begin, target_end,
                                                                    params.vocab_begin + params.count);

  for (int32_t base = 0; base < params.count; base += kStep) {
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int32_t v = EntryOf(base, j);
      if (v >= params.count) {
        continue;
      }
      float gradient[kVector], slope[kVector];
      products.Get<Element>(params, j, v, gradient);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const Logit logit = LogitOf<kSoftcap>(params, gradient[i]);
        gradient[i] = of_row.OfLogit(logit.value);
        slope[i] = logit.slope;
      }
      if (chunk_begin < chunk_end) {
        const int64_t first = params.vocab_begin + v;
        for (int64_t t = LowerBound(params.targets, chunk_begin, chunk_end, first);
             t < chunk_end && params.targets[t] < first + kVector; ++t) {
          const int64_t place = params.targets[t] - first;
          const float upstream = params.dlogprob[params.target_index[t]];
#pragma unroll
          for (int i = 0; i < kVector; ++i) {
            gradient[i] += place == i ? upstream : 0.0f;
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        gradient[i] *= slope[i];
      }
      gradients[v / kVector] = PackedVector<Element>(gradient);
    }
    products = Products(logits, base + kStep, params.count);
  }
}

}  // namespace linear_logprob

namespace {

using namespace linear_logprob;

Params KernelParams(const dualkv_linear_logprob_chunk_params& params, const float* dlogprob,
                    const float* dentropy) {
  const int64_t bias_bytes = params.vocab_begin * (params.dtype == DUALKV_FLOAT32 ? 4 : 2);
  return {.logits = params.logits,
          .row_stride = params.logits_row_stride,
          .vocab_size = params.vocab_size,
          .vocab_begin = params.vocab_begin,
          .count = static_cast<int32_t>(params.vocab_count),
          .bias = params.bias == nullptr ? nullptr : static_cast<const char*>(params.bias) + bias_bytes,
          .inverse_temperature = static_cast<float>(1 / params.temperature),
          .softcap = static_cast<float>(params.softcap),
          .inverse_softcap = params.softcap > 0 ? static_cast<float>(1 / params.softcap) : 0.0f,
          .target_ranges = params.target_ranges,
          .targets = params.targets,
          .target_index = params.target_index,
          .statistics = params.statistics,
          .logprob = params.logprob,
          .entropy = params.entropy,
          .lse = params.lse,
          .dlogprob = dlogprob,
          .dentropy = dentropy};
}

using Kernel = void (*)(Params);

template <class Element>
struct Kernels {
  static Kernel ForwardFor(bool softcap) {
    return softcap ? Forward<Element, true> : Forward<Element, false>;
  }
  static Kernel BackwardFor(bool softcap) {
    return softcap ? Backward<Element, true> : Backward<Element, false>;
  }
};

// select: returns the kernel of Kernels<Element>.
template <class Select>
void LaunchRows(const dualkv_linear_logprob_chunk_params& params, const Params& kernel_params,
                Select select) {
  RequireHopper();
  if (params.num_rows == 0 || params.vocab_count == 0) {
    return;
  }
  const bool softcap = params.softcap > 0;
  const Kernel kernel = params.dtype == DUALKV_FLOAT32    ? select(Kernels<float>(), softcap)
                        : params.dtype == DUALKV_BFLOAT16 ? select(Kernels<__nv_bfloat16>(), softcap)
                                                          : select(Kernels<__half>(), softcap);
  Launch(kernel, static_cast<int>(params.num_rows), kThreads, 0, static_cast<cudaStream_t>(params.stream),
         kernel_params);
}

}  // namespace

void LinearLogprobChunkForward(const dualkv_linear_logprob_chunk_params& params) {
  LaunchRows(params, KernelParams(params, nullptr, nullptr),
             [](auto kernels, bool softcap) { return kernels.ForwardFor(softcap); });
}

void LinearLogprobChunkBackward(const dualkv_linear_logprob_chunk_backward_params& params) {
  LaunchRows(params.forward, KernelParams(params.forward, params.dlogprob, params.dentropy),
             [](auto kernels, bool softcap) { return kernels.BackwardFor(softcap); });
}

}  // namespace dualkv::cuda
