#include "rollout_reader.h"

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <system_error>
#include <unordered_map>

namespace dualkv::cli {
namespace {

using nlohmann::json;

constexpr int kMaxDepth = 500;           // of values in values; Python's reader gives up near 1000
constexpr size_t kShownCharacters = 60;  // of an offending value, in a message

// A value as a message shows it: in ASCII, so that it can be cut anywhere, and whatever its bytes are.
std::string Shown(const json& value) {
  std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  if (text.size() > kShownCharacters) {
    text.resize(kShownCharacters - 2);
    text += "..";
  }
  return text;
}

// A JSON object and the place where it stands; reads its values, and names one that is wrong.
class Record {
 public:
  Record(std::string place, const json& values) : place_(std::move(place)), values_(values) {
    if (!values.is_object()) {
      Fail("expected a JSON object, got " + Shown(values));
    }
  }

  [[noreturn]] void Fail(const std::string& message) const { throw RolloutError(place_ + ": " + message); }

  bool Has(const char* key) const { return values_.contains(key); }

  std::string Keys() const {
    json keys = json::array();
    for (const auto& item : values_.items()) {
      keys.push_back(item.key());
    }
    return Shown(keys);
  }

  const json& Value(const char* key) const {
    if (!Has(key)) {
      Fail("no key " + Quoted(key) + "; the keys are " + Keys());
    }
    return values_.at(key);
  }

  const std::string& Text(const char* key) const {
    const json& value = Value(key);
    if (!value.is_string()) {
      Fail(Quoted(key) + " must be a string, got " + Shown(value));
    }
    return value.get_ref<const std::string&>();
  }

  int64_t TextBytes(const char* key) const { return static_cast<int64_t>(Text(key).size()); }

  int64_t NumTokens(const char* key) const {
    const json& value = Value(key);
    if (!value.is_array()) {
      Fail(Quoted(key) + " must be a list of token ids, got " + Shown(value));
    }
    for (size_t i = 0; i < value.size(); ++i) {
      if (!value[i].is_number_integer() || value[i] < 0 || value[i] > INT32_MAX) {
        Fail(Quoted(key) + " holds no token id at index " + std::to_string(i) + ", but " + Shown(value[i]));
      }
    }
    return static_cast<int64_t>(value.size());
  }

  void RequireNumber(const char* key) const {
    const json& value = Value(key);
    if (!value.is_number()) {  // a number is finite: see Parse
      Fail(Quoted(key) + " must be a finite number, got " +
           (value.is_null() ? "null, NaN or Infinity" : Shown(value)));
    }
  }

  std::vector<Record> Records(const char* key) const {
    const json& value = Value(key);
    if (!value.is_array() || value.empty()) {
      Fail(Quoted(key) + " must be a list with at least one entry, got " + Shown(value));
    }
    std::vector<Record> records;
    for (size_t i = 0; i < value.size(); ++i) {
      records.emplace_back(place_ + ": " + key + "[" + std::to_string(i) + "]", value[i]);
    }
    return records;
  }

 private:
  static std::string Quoted(const char* key) { return std::string("'") + key + "'"; }

  std::string place_;
  const json& values_;
};

// The length of the word in front of `text`, if it is one of three that Python's json writes and JSON does
// not have.
size_t NonFiniteLength(std::string_view text) {
  for (const std::string_view word : {"NaN", "Infinity", "-Infinity"}) {
    if (text.starts_with(word)) {
      return word.size();
    }
  }
  return 0;
}

// Such words become null, which is refused where a number is wanted, and is not looked at elsewhere.
std::string WithoutNonFinite(std::string_view line) {
  std::string result;
  bool in_string = false;
  while (!line.empty()) {
    const size_t word = in_string ? 0 : NonFiniteLength(line);
    const size_t character = in_string && line[0] == '\\' ? 2 : 1;  // an escaped quote does not end a string
    if (line[0] == '"') {
      in_string = !in_string;
    }
    result += word > 0 ? "null" : line.substr(0, character);
    line.remove_prefix(std::min(std::max(word, character), line.size()));
  }
  return result;
}

// json::dump refuses text that is not UTF-8.
bool IsUtf8(const std::string& text) try {
  json(text).dump();
  return true;
} catch (const json::type_error&) {
  return false;
}

json Parse(const std::string& place, const std::string& line) {
  // NOTE: the parser takes a zero byte for the end of its input, and would not see what follows.
  if (line.find('\0') != std::string::npos) {
    throw RolloutError(place + ": not UTF-8 text: there is a zero byte in " + Shown(line));
  }
  const bool is_strict = line.find("NaN") == std::string::npos && line.find("Infinity") == std::string::npos;
  try {
    return json::parse(is_strict ? line : WithoutNonFinite(line), [&](int depth, auto, const json&) {
      if (depth > kMaxDepth) {
        throw RolloutError(place + ": nested more than " + std::to_string(kMaxDepth) +
                           " deep: " + Shown(line));
      }
      return true;
    });
  } catch (const json::out_of_range&) {
    throw RolloutError(place + ": a number is too large: " + Shown(line));
  } catch (const json::parse_error&) {
    throw RolloutError(place + (IsUtf8(line) ? ": not JSON, or cut off: " : ": not UTF-8 text: ") +
                       Shown(line));
  }
}

// A group that fills a line. `length` reads a text or a list of token ids.
Group ReadGroup(const Record& line, const char* prompt, const char* response,
                int64_t (Record::*length)(const char* key) const) {
  Group group{.prompt = (line.*length)(prompt), .responses = {}};
  for (const Record& record : line.Records("responses")) {
    group.responses.push_back((record.*length)(response));
    record.RequireNumber("reward");
  }
  return group;
}

// Collects veRL's samples into groups, in the order of their first samples.
class VerlGroups {
 public:
  void Add(const Record& line, std::vector<Group>& groups) {
    const std::string& input = line.Text("input");
    const json given_uid = line.Has("uid") ? line.Value("uid") : json();
    const json uid = given_uid.is_null() ? json(input) : given_uid;
    const json step = line.Has("step") ? line.Value("step") : json();
    const auto [found, is_new] =
        places_.try_emplace(json::array({step, uid}).dump(), Place{.group = groups.size(), .input = input});
    const Place& place = found->second;
    if (is_new) {
      groups.push_back({.prompt = line.TextBytes("input"), .responses = {}});
    } else if (place.input != input) {
      line.Fail("uid " + Shown(uid) + " has another 'input' than before: " + Shown(input) + ", not " +
                Shown(place.input));
    }
    groups[place.group].responses.push_back(line.TextBytes("output"));
    line.RequireNumber("score");
  }

 private:
  struct Place {
    size_t group;
    std::string input;
  };

  std::unordered_map<std::string, Place> places_;  // by step and uid
};

enum class Kind { kText, kTokens, kVerl };

Kind KindOf(const Record& line) {
  if (line.Has("prompt")) {
    return Kind::kText;
  }
  if (line.Has("prompt_ids")) {
    return Kind::kTokens;
  }
  if (line.Has("input")) {
    return Kind::kVerl;
  }
  line.Fail("a rollout has the key 'prompt', 'prompt_ids' or (veRL) 'input', but the keys are " +
            line.Keys());
}

std::string LastSystemError() { return std::generic_category().message(errno); }

}  // namespace

Rollouts ReadRollouts(std::istream& in, const std::string& name) {
  Rollouts rollouts;
  VerlGroups verl;
  std::optional<Kind> kind;  // that of the first line
  std::string text;
  for (int64_t number = 1; std::getline(in, text); ++number) {
    if (text.find_first_not_of(" \t\r\v\f") == std::string::npos) {
      continue;
    }
    const std::string place = name + ":" + std::to_string(number);
    const json values = Parse(place, text);
    const Record line(place, values);
    if (!kind) {
      kind = KindOf(line);
    }
    switch (*kind) {
      case Kind::kText:
        rollouts.groups.push_back(ReadGroup(line, "prompt", "text", &Record::TextBytes));
        break;
      case Kind::kTokens:
        rollouts.groups.push_back(ReadGroup(line, "prompt_ids", "ids", &Record::NumTokens));
        break;
      case Kind::kVerl:
        verl.Add(line, rollouts.groups);
        break;
    }
  }
  if (in.bad()) {
    throw RolloutError(name + ": cannot be read: " + LastSystemError());
  }
  if (!kind) {
    throw RolloutError(name + ": is empty: expected one JSON object a line");
  }
  rollouts.is_text = *kind != Kind::kTokens;
  return rollouts;
}

Rollouts ReadRolloutFile(const std::string& path) {
  if (path == "-") {
    return ReadRollouts(std::cin, "<stdin>");
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw RolloutError(path + ": cannot be read: " + LastSystemError());
  }
  return ReadRollouts(file, path);
}

}  // namespace dualkv::cli
