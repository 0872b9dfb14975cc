// Names of functions from the symbol tables of ELF files (symbols.h).
#include "tests/support/stacks/symbols.h"

#include <cxxabi.h>
#include <elf.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>
#include <sstream>

namespace tessera::testing {
namespace {

constexpr size_t kLongestName = 240;  // longest printed name; names of templates may be very long

std::string demangled(const char* name) {
  int failed = 0;
  const std::unique_ptr<char, decltype(&std::free)> text(abi::__cxa_demangle(name, nullptr, nullptr, &failed),
                                                         std::free);
  std::string result = failed == 0 && text ? text.get() : name;
  if (result.size() > kLongestName) result = result.substr(0, kLongestName) + "...";
  return result;
}

std::string hexadecimal(uint64_t number) {
  std::ostringstream text;
  text << "0x" << std::hex << number;
  return text.str();
}

}  // namespace

// The functions of a 64-bit ELF file. A file that cannot be read has none.
class Module {
 public:
  explicit Module(const std::string& path) : file_(path, std::ios::binary) {
    Elf64_Ehdr header{};
    if (!read(0, &header, sizeof header) || std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 ||
        header.e_ident[EI_CLASS] != ELFCLASS64) {
      return;
    }
    segments_.resize(header.e_phnum);
    if (!read(header.e_phoff, segments_.data(), segments_.size() * sizeof(Elf64_Phdr))) segments_.clear();
    std::vector<Elf64_Shdr> sections(header.e_shnum);
    if (!read(header.e_shoff, sections.data(), sections.size() * sizeof(Elf64_Shdr))) return;
    for (const uint32_t kind : {SHT_SYMTAB, SHT_DYNSYM}) {
      for (const Elf64_Shdr& section : sections) {
        if (functions_.empty() && section.sh_type == kind && section.sh_link < sections.size()) {
          take_functions(section, sections[section.sh_link]);
        }
      }
    }
  }

  // The function at `offset` in the file; nullopt if no function is known there.
  std::optional<std::string> function_at(uint64_t offset) const {
    for (const Elf64_Phdr& segment : segments_) {
      if (segment.p_type != PT_LOAD || offset < segment.p_offset || offset - segment.p_offset >= segment.p_filesz) {
        continue;
      }
      const uint64_t address = offset - segment.p_offset + segment.p_vaddr;
      auto found = std::ranges::upper_bound(functions_, address, {}, &Elf64_Sym::st_value);
      if (found == functions_.begin()) return std::nullopt;
      --found;
      const uint64_t within = address - found->st_value;
      if (found->st_name >= names_.size() || (found->st_size > 0 && within >= found->st_size)) return std::nullopt;
      return demangled(names_.data() + found->st_name) + "+" + hexadecimal(within);
    }
    return std::nullopt;
  }

 private:
  bool read(uint64_t offset, void* into, size_t size) {
    file_.seekg(static_cast<std::streamoff>(offset));
    return static_cast<bool>(file_.read(static_cast<char*>(into), static_cast<std::streamsize>(size)));
  }
  void take_functions(const Elf64_Shdr& symbols, const Elf64_Shdr& names) {
    functions_.resize(symbols.sh_size / sizeof(Elf64_Sym));
    names_.resize(names.sh_size + 1);
    if (!read(symbols.sh_offset, functions_.data(), functions_.size() * sizeof(Elf64_Sym)) ||
        !read(names.sh_offset, names_.data(), names.sh_size)) {
      functions_.clear();
    }
    std::erase_if(functions_, [](const Elf64_Sym& one) {
      return ELF64_ST_TYPE(one.st_info) != STT_FUNC || one.st_shndx == SHN_UNDEF;
    });
    std::ranges::sort(functions_,
                      [](const Elf64_Sym& one, const Elf64_Sym& other) { return one.st_value < other.st_value; });
  }

  std::ifstream file_;
  std::vector<Elf64_Phdr> segments_;
  std::vector<Elf64_Sym> functions_;  // sorted by address
  std::vector<char> names_;           // ends with a zero
};

ProcessMap::ProcessMap(pid_t process) {
  std::ifstream lines("/proc/" + std::to_string(process) + "/maps");
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    Range range;
    std::string rights, device, inode;
    char dash = 0;
    words >> std::hex >> range.begin >> dash >> range.end >> rights >> range.offset >> device >> inode >> range.path;
    if (!range.path.empty()) ranges_.push_back(std::move(range));
  }
}

ProcessMap::~ProcessMap() = default;

std::string ProcessMap::describe(uint64_t address) const {
  for (const Range& range : ranges_) {
    if (address < range.begin || address >= range.end) continue;
    auto& module = modules_[range.path];
    if (!module) module = std::make_shared<Module>(range.path);
    const auto function = module->function_at(address - range.begin + range.offset);
    const std::string file = range.path.substr(range.path.rfind('/') + 1);
    return function.value_or(hexadecimal(address - range.begin + range.offset)) + " (" + file + ")";
  }
  return hexadecimal(address);
}

}  // namespace tessera::testing
