// replay PATH...: runs a target over files, and over the files of folders.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "fuzz.h"

namespace {

std::size_t replay(const std::filesystem::path& path) {
  std::size_t files = 0;
  if (std::filesystem::is_directory(path)) {
    for (const auto& entry : std::filesystem::directory_iterator(path)) files += replay(entry.path());
    return files;
  }
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  std::printf("%s\n", path.c_str());  // the last line, if it crashes
  std::fflush(stdout);
  LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(text.data()), text.size());
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  std::size_t files = 0;
  for (int i = 1; i < argc; ++i) files += replay(argv[i]);
  std::printf("%zu inputs\n", files);
  return files > 0 ? 0 : 1;
}
