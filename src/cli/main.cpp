// The command line program. See `dualkv --help`.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <iomanip>
#include <iostream>
#include <locale>
#include <nlohmann/json.hpp>

#include "estimate.h"
#include "rollout_reader.h"

namespace dualkv::cli {
namespace {

using nlohmann::ordered_json;

constexpr int kFailure = 2;  // exit status of bad input and bad arguments
constexpr int kBarWidth = 40;
constexpr double kMaxBytesPerToken = 1000;
constexpr int64_t kMaxCount = int64_t{1} << 30;  // of rows in a forest, and so of all that is counted in rows

struct Arguments {
  std::string file;
  bool json = false;
  double bytes_per_token = 1;
  EstimateOptions options;
};

// --------------------------------------------------------------------------------------------------- JSON

ordered_json ToJson(const Comparison& work) {
  return {{"replicated_tokens", work.replicated.tokens}, {"packed_tokens", work.packed.tokens},
          {"token_ratio", work.token_ratio()},           {"replicated_pairs", work.replicated.pairs},
          {"packed_pairs", work.packed.pairs},           {"attention_ratio", work.attention_ratio()}};
}

void PrintJson(std::ostream& out, const Arguments& arguments, bool is_text, const Estimate& estimate) {
  ordered_json object = {{"groups", estimate.groups},
                         {"responses", estimate.responses},
                         {"bytes_per_token", nullptr},
                         {"window_left", nullptr}};
  if (is_text) {
    object["bytes_per_token"] = arguments.bytes_per_token;
  }
  if (arguments.options.window_left) {
    object["window_left"] = *arguments.options.window_left;
  }
  object.update(ToJson(estimate.work));
  object["histogram"] = ordered_json::array();
  for (const HistogramBin& bin : estimate.histogram) {
    object["histogram"].push_back({{"begin", bin.begin}, {"end", bin.end}, {"groups", bin.groups}});
  }
  object["micro_batches"] = nullptr;
  if (estimate.micro_batches) {
    object["micro_batches"] = {{"size", *arguments.options.micro_batch_size},
                               {"count", estimate.micro_batches->count}};
    object["micro_batches"].update(ToJson(estimate.micro_batches->work));
  }
  out << object.dump(2) << "\n";
}

// --------------------------------------------------------------------------------------------------- text

struct Thousands : std::numpunct<char> {
  char do_thousands_sep() const override { return ','; }
  std::string do_grouping() const override { return "\3"; }
};

void PrintRow(std::ostream& out, const char* name, double replicated, double packed, double ratio) {
  out << std::left << std::setw(16) << name << std::right << std::setprecision(0) << std::setw(20)
      << replicated << std::setw(20) << packed << std::setprecision(2) << std::setw(9) << ratio << "x\n";
}

void PrintComparison(std::ostream& out, const Comparison& work) {
  PrintRow(out, "tokens", static_cast<double>(work.replicated.tokens),
           static_cast<double>(work.packed.tokens), work.token_ratio());
  PrintRow(out, "attention pairs", work.replicated.pairs, work.packed.pairs, work.attention_ratio());
}

void PrintHistogram(std::ostream& out, const std::vector<HistogramBin>& bins) {
  const int64_t most = std::ranges::max(bins, {}, &HistogramBin::groups).groups;
  for (const HistogramBin& bin : bins) {
    const int64_t bar = (bin.groups * kBarWidth + most - 1) / most;
    out << std::setw(9) << bin.begin << " to" << std::setw(9) << bin.end - 1 << std::setw(15) << bin.groups
        << (bar > 0 ? "  " : "") << std::string(bar, '#') << "\n";
  }
}

void PrintText(std::ostream& out, const Arguments& arguments, bool is_text, const Estimate& estimate) {
  out.imbue(std::locale(out.getloc(), new Thousands));
  out << estimate.groups << " groups, " << estimate.responses << " responses\n";
  if (is_text) {
    out << "bytes per token: " << arguments.bytes_per_token
        << " (--bytes-per-token); special tokens are not counted\n";
  }
  out << std::fixed << "\n"
      << std::setw(36) << "replicated" << std::setw(20) << "packed" << std::setw(11) << "ratio\n";
  PrintComparison(out, estimate.work);
  if (estimate.micro_batches) {
    out << "\nin " << estimate.micro_batches->count << " micro-batches of at most "
        << *arguments.options.micro_batch_size << " responses\n";
    PrintComparison(out, estimate.micro_batches->work);
  }
  out << "\n" << std::setw(21) << "prompt tokens" << std::setw(16) << "groups\n";
  PrintHistogram(out, estimate.histogram);
}

// -------------------------------------------------------------------------------------------------- command

void RunEstimate(const Arguments& arguments) {
  Rollouts rollouts = ReadRolloutFile(arguments.file);
  if (rollouts.is_text) {
    rollouts.groups = TokensOfBytes(rollouts.groups, arguments.bytes_per_token);
  }
  const Estimate estimate = EstimateSavings(rollouts.groups, arguments.options);
  (arguments.json ? PrintJson : PrintText)(std::cout, arguments, rollouts.is_text, estimate);
  if (!std::cout.flush()) {
    throw std::runtime_error("dualkv: standard output cannot be written");
  }
}

void AddEstimate(CLI::App& app, Arguments& arguments) {
  CLI::App* estimate = app.add_subcommand("estimate", "What sharing prompts would save on your rollouts");
  estimate
      ->add_option(
          "FILE", arguments.file,
          R"(JSON lines: {"prompt", "responses": [{"text", "reward"}]}, {"prompt_ids", "responses": )"
          R"([{"ids", "reward"}]}, or what veRL writes to rollout_data_dir; - reads standard input)")
      ->required()
      ->option_text(" ");
  estimate->add_flag("--json", arguments.json, "Print one JSON object");
  estimate
      ->add_option_function<double>(
          "--bytes-per-token",
          [&arguments](double value) {
            if (!(value >= 1 && value <= kMaxBytesPerToken)) {  // NaN too
              throw CLI::ValidationError("--bytes-per-token", "must be a number from 1 to 1000");
            }
            arguments.bytes_per_token = value;
          },
          "Bytes of text that make a token (1 if not given); token ids are counted as they are")
      ->option_text("X");
  estimate
      ->add_option("--window-left", arguments.options.window_left,
                   "Sliding window: earlier positions that a token sees besides itself")
      ->check(CLI::Range(int64_t{0}, kMaxCount))
      ->option_text("N");
  estimate
      ->add_option("--micro-batch-size", arguments.options.micro_batch_size,
                   "Estimate also with micro-batches of at most N responses: whole groups, as many as fit; a "
                   "larger group is split, and each part has the prompt")
      ->check(CLI::Range(int64_t{1}, kMaxCount))
      ->option_text("N");
}

int Main(int argc, char** argv) {
  Arguments arguments;
  CLI::App app("Shared-prompt attention for RL post-training: each prompt of a batch is computed once.",
               "dualkv");
  app.set_version_flag("--version", std::string("dualkv ") + dualkv_version());
  app.require_subcommand(1);
  AddEstimate(app, arguments);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {  // also how --help and --version end
    return app.exit(error) == 0 ? 0 : kFailure;
  }
  RunEstimate(arguments);
  return 0;
}

}  // namespace
}  // namespace dualkv::cli

int main(int argc, char** argv) try {
  return dualkv::cli::Main(argc, argv);
} catch (const std::exception& error) {
  std::cerr << error.what() << "\n";
  return dualkv::cli::kFailure;
}
