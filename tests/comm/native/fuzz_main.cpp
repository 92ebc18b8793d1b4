// Drives a fuzz target where libFuzzer is not at hand: mutates a corpus, keeps nothing, stops at the first crash.
// `fuzz SECONDS CORPUS [SEED]`. A crashing input is left in ./crash.bin.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

int main(int argc, char** argv) {
  if (argc < 3) return std::fprintf(stderr, "usage: %s SECONDS CORPUS [SEED]\n", argv[0]), 2;
  std::vector<std::string> corpus{""};
  for (auto& entry : std::filesystem::directory_iterator(argv[2])) {
    std::ifstream file(entry.path(), std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  std::mt19937_64 random(argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1);
  auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(std::atof(argv[1]));
  const uint64_t interesting[] = {0, 1, 0x7fffffff, 0xffffffff, 0x40000, 0x40001, 0x10000, 0x10001, ~0ull, 1ull << 63};
  uint64_t runs = 0;
  for (const std::string& seed : corpus) LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(seed.data()), seed.size());
  while (std::chrono::steady_clock::now() < until) {
    std::string input = corpus[random() % corpus.size()];
    for (uint64_t change = 0; change <= random() % 6; change++) {
      size_t at = input.empty() ? 0 : random() % input.size();
      switch (random() % 6) {
        case 0:
          if (!input.empty()) input[at] = static_cast<char>(random());
          break;
        case 1: {
          uint64_t value = interesting[random() % std::size(interesting)];
          size_t width = size_t{1} << (random() % 4);
          for (size_t i = 0; i < width && at + i < input.size(); i++) input[at + i] = static_cast<char>(value >> (8 * i));
          break;
        }
        case 2: input.resize(at); break;
        case 3: input += corpus[random() % corpus.size()]; break;
        case 4: input.insert(at, std::string(random() % 300, static_cast<char>(random()))); break;
        default:
          for (int i = 0; i < 40; i++) input.push_back(static_cast<char>(random()));
      }
      if (input.size() > (1u << 16)) input.resize(1u << 16);
    }
    std::ofstream("crash.bin", std::ios::binary) << input;
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
    runs++;
  }
  std::filesystem::remove("crash.bin");
  std::printf("%llu inputs\n", static_cast<unsigned long long>(runs));
}
