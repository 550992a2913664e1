// The producer: one thread walks the plan and keeps the rings of queries, keys and values full.
#pragma once

#include "cuda/attention_forward/config.cuh"
#include "cuda/ptx/tensor_copy.cuh"

namespace dualkv::cuda::attention_forward {

template <class Element, int kHeadDim>
class Producer {
  using Memory = SharedMemory<Element, kHeadDim>;
  static constexpr int kKeyTile = Config<kHeadDim>::kKeyTile;

 public:
  __device__ Producer(const Params& params, Memory& memory)
      : params_(params),
        memory_(memory),
        tiles_(reinterpret_cast<const int4*>(Part(params.plan->tiles))),
        runs_(reinterpret_cast<const core::ImageRun*>(Part(params.plan->runs))) {}

  __device__ void Run() {
    // Tiles come heaviest first. Blocks take them to and fro, so that each gets as much.
    const int32_t packs = params_.num_heads / params_.packed;
    const int64_t items = static_cast<int64_t>(params_.plan->num_tiles) * packs;
    const int64_t blocks = gridDim.x;
    bool forth = true;
    for (int64_t first = 0; first < items; first += blocks, forth = !forth) {
      const int64_t item = first + (forth ? blockIdx.x : blocks - 1 - blockIdx.x);
      if (item < items) {
        const auto tile = static_cast<int32_t>(item / packs);
        RunTile(tile, static_cast<int32_t>(item - static_cast<int64_t>(tile) * packs));
      }
    }
    FlushValues();
    ptx::MbarrierWait(&memory_.keys_empty[keys_.index], keys_.parity ^ 1);
    memory_.steps[keys_.index].flags = Step::kEnd;
    ptx::MbarrierArrive(&memory_.keys_full[keys_.index]);
  }

 private:
  __device__ const std::byte* Part(uint64_t offset) const {
    return reinterpret_cast<const std::byte*>(params_.plan) + offset;
  }

  __device__ void RunTile(int32_t tile, int32_t pack) {
    const int4 packed_tile = __ldg(tiles_ + tile);
    const dualkv_tile query = {packed_tile.x, packed_tile.y, packed_tile.z, packed_tile.w};
    const int32_t kv_head = pack / params_.packs_per_kv_head;
    CopyQueries(query.begin, pack);

    Step step;
    step.row_begin = query.begin;
    step.row_end = query.end;
    step.head_begin = pack * params_.packed;
    int32_t first = Step::kFirst;
    for (int32_t r = query.run_begin; r < query.run_end; ++r) {
      const core::ImageRun run = runs_[r];
      step.segment = run.segment;
      for (int32_t key = run.begin; key < run.end; key += kKeyTile) {
        const int32_t width = run.end - key;
        const bool last = r + 1 == query.run_end && width <= kKeyTile;
        step.flags = first | (last ? Step::kLast : 0) | (run.masked || width < kKeyTile ? Step::kMasked : 0) |
                     (width <= kKeyTile / 2 ? Step::kNarrow : 0) |
                     (key + kKeyTile > params_.plan->total_tokens ? Step::kPastEnd : 0);
        step.key_begin = key;
        CopyKeys(step, kv_head);
        // The values of a step are needed after the keys of the next.
        FlushValues();
        pending_key_ = key;
        pending_head_ = kv_head;
        first = 0;
      }
    }
  }

  __device__ void CopyQueries(int32_t row, int32_t pack) {
    ptx::Mbarrier* full = &memory_.queries_full[queries_.index];
    ptx::MbarrierWait(&memory_.queries_empty[queries_.index], queries_.parity ^ 1);
    ptx::MbarrierArriveExpect(full, params_.rows_per_tile * params_.packed * kHeadDim * sizeof(Element));
    for (int box = 0; box < Memory::kBoxes; ++box) {
      ptx::TensorCopy4d(memory_.queries[queries_.index][box], &params_.queries, full, 64 * box, 0, pack,
                        row - params_.query_row_begin);
    }
    queries_.Next();
  }

  __device__ void CopyKeys(const Step& step, int32_t kv_head) {
    ptx::Mbarrier* full = &memory_.keys_full[keys_.index];
    ptx::MbarrierWait(&memory_.keys_empty[keys_.index], keys_.parity ^ 1);
    memory_.steps[keys_.index] = step;
    ptx::MbarrierArriveExpect(full, sizeof(memory_.keys[0]));
    for (int box = 0; box < Memory::kBoxes; ++box) {
      ptx::TensorCopy3d(memory_.keys[keys_.index][box], &params_.keys, full, 64 * box, kv_head,
                        step.key_begin);
    }
    keys_.Next();
  }

  __device__ void FlushValues() {
    if (pending_key_ < 0) {
      return;
    }
    ptx::Mbarrier* full = &memory_.values_full[values_.index];
    ptx::MbarrierWait(&memory_.values_empty[values_.index], values_.parity ^ 1);
    ptx::MbarrierArriveExpect(full, sizeof(memory_.values[0]));
    for (int box = 0; box < Memory::kBoxes; ++box) {
      ptx::TensorCopy3d(memory_.values[values_.index][box], &params_.values, full, 64 * box, pending_head_,
                        pending_key_);
    }
    values_.Next();
    pending_key_ = -1;
  }

  const Params& params_;
  Memory& memory_;
  const int4* tiles_;
  const core::ImageRun* runs_;
  RingPosition<kQueryBuffers> queries_;
  RingPosition<kStages> keys_;
  RingPosition<kStages> values_;
  int32_t pending_key_ = -1;  // values to be copied
  int32_t pending_head_ = 0;
};

// Rows that are no queries, of keys-only segments and past the forest: out = 0, lse = -inf. Warp `warp` of
// `warps` of the grid takes its share.
template <class Element>
__device__ void ClearRows(const Params& params, int32_t warp, int32_t warps) {
  const int32_t lane = threadIdx.x % 32;
  auto clear = [&](int64_t begin, int64_t end) {
    for (int64_t row = (begin < 0 ? 0 : begin) + warp; row < end; row += warps) {
      for (int64_t head = 0; head < params.num_heads; ++head) {
        auto* out = reinterpret_cast<int4*>(static_cast<Element*>(params.out) + row * params.out_row_stride +
                                            head * params.out_head_stride);
        if (lane < params.head_dim / 8) {
          out[lane] = int4{0, 0, 0, 0};
        }
        if (params.lse != nullptr && lane == 0) {
          params.lse[head * params.query_rows + row] = -INFINITY;
        }
      }
    }
  };
  const core::PlanImageHeader& plan = *params.plan;
  const auto* cleared =
      reinterpret_cast<const core::Interval*>(reinterpret_cast<const std::byte*>(params.plan) + plan.cleared);
  auto clamp = [&](int64_t row) { return row < params.query_rows ? row : params.query_rows; };
  for (int32_t i = 0; i < plan.num_cleared; ++i) {
    clear(cleared[i].begin - params.query_row_begin, clamp(cleared[i].end - params.query_row_begin));
  }
  clear(plan.total_tokens - params.query_row_begin, params.query_rows);
}

}  // namespace dualkv::cuda::attention_forward
