// The command line tool: thinwire info, thinwire bench, thinwire inspect.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <string>

#include "bench.h"
#include "info.h"
#include "inspect.h"
#include "thinwire/error.h"
#include "workload.h"

int main(int argc, char** argv) {
  using namespace thinwire::tools;
  CLI::App app("Gradient compression for data-parallel training on thin networks.", "thinwire");
  app.set_version_flag("--version", THINWIRE_VERSION);
  app.require_subcommand(1);

  bool info_json = false;
  CLI::App* info = app.add_subcommand("info", "Shows what this machine and this build have.");
  info->add_flag("--json", info_json, "Print one JSON object");

  BenchOptions options;
  CLI::App* bench = app.add_subcommand(
      "bench", "Times each stage next to a read pass over the same memory, after verifying it against an oracle.");
  bench->add_option("--stage", options.stages, "Stages to time; all unless given")->check(CLI::IsMember(stages()));
  bench->add_option("--selector", options.selectors, "Selectors to time; all unless given")
      ->check(CLI::IsMember(selectors()));
  bench->add_option("--numel", options.numel, "Elements, such as 1000000 or 16Mi")
      ->transform(CLI::AsSizeValue(false))
      ->check(CLI::Range(std::size_t{1}, std::size_t{1} << 31))
      ->default_str("16Mi");
  bench->add_option("--density", options.density, "Share of the elements that is selected, in (0, 1]")
      ->capture_default_str();
  auto* distribution = bench->add_option("--distribution", options.distributions, "Distribution of the gradients")
                           ->check(CLI::IsMember(distributions()))
                           ->capture_default_str();
  bench->add_option("--input", options.input, "A .npy file of float32 values, repeated to --numel elements")
      ->check(CLI::ExistingFile)
      ->excludes(distribution);
  bench->add_option("--threads", options.threads, "Threads that run the stage side by side, each on its own data")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  bench->add_option("--repetitions", options.repetitions, "Times each stage so often, with a new seed each time")
      ->check(CLI::Range(1, 1'000'000));
  bench->add_option("--seconds", options.seconds, "Time to spend on each row, unless --repetitions is given")
      ->capture_default_str();
  bench->add_option("--json", options.json, "Write the rows to this file");

  InspectOptions inspected;
  CLI::App* inspect = app.add_subcommand(
      "inspect", "Shows what a payload file holds, and checks every byte of it. A refused one is exit status 1.");
  inspect->add_option("payload", inspected.path, "A payload, with or without its padding")
      ->required()
      ->check(CLI::ExistingFile);
  inspect->add_option("--numel", inspected.numel, "Elements of the bucket that it is for, if they are known");
  inspect->add_flag("--json", inspected.json, "Print one JSON object");

  CLI11_PARSE(app, argc, argv);
  try {
    if (*info) print_info(info_json);
    if (*bench && !run_bench(options)) return 1;
    if (*inspect) print_payload(inspected);
  } catch (const thinwire::Error& error) {
    std::fprintf(stderr, "thinwire: %s\n", error.what());
    return error.code() == thinwire::ErrorCode::corrupt_payload ? 1 : 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "thinwire: %s\n", error.what());
    return 2;
  }
  return 0;
}
