// Rollout files: groups of sampled responses, as JSON lines. Of a file, only the lengths are kept.
//
// Three kinds of line are known; a file holds one kind:
//
//   {"prompt": "..", "responses": [{"text": "..", "reward": 1.0}, ..]}          a group, as text
//   {"prompt_ids": [1, 2], "responses": [{"ids": [3, 4], "reward": 1.0}, ..]}   a group, as token ids
//   {"input": "..", "output": "..", "score": 1.0, "step": 3, ..}                one sample of veRL's
//                                                                               trainer.rollout_data_dir
//
// Samples of the same step with the same `uid` make a group, or with the same `input` where the lines have no
// uid. The same files are accepted as by dualkv.rollouts in Python, NaN and Infinity in keys that are not
// read included. NOTE: stricter than Python in such keys only: half a surrogate pair and numbers beyond a
// double are refused.
#pragma once

#include <istream>
#include <stdexcept>
#include <string>
#include <vector>

#include "dualkv/dualkv.hpp"

namespace dualkv::cli {

// The message says where and what: "FILE:LINE: what".
struct RolloutError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Rollouts {
  std::vector<Group> groups;
  bool is_text = false;  // lengths are bytes of UTF-8; otherwise numbers of token ids
};

// Reads a whole stream; messages call it `name`. Throws RolloutError at the first line that is wrong.
Rollouts ReadRollouts(std::istream& in, const std::string& name);

// Reads a file, or standard input for "-".
Rollouts ReadRolloutFile(const std::string& path);

}  // namespace dualkv::cli
