// What makes a folder a run's: .tessera/run.json in it, which also remembers what was written under names that a user
// may want for himself (recipe.yaml, model/). docs/format/run.md.
//
//   RunMark mark(dir);                                // reads it
//   mark.check_free();                                // nothing of somebody else's is under our names
//   mark.set();
//   mark.announce("recipe.yaml", fingerprint);        // before it is written
//   mark.settle("recipe.yaml");                       // after
//   if (mark.owns("recipe.yaml")) ...                 // it is there as we left it
//
// Not thread-safe; the lock of the folder keeps other processes out.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace tessera::train {

class RunMark {
 public:
  // Error kFormat when .tessera/run.json is something else.
  explicit RunMark(std::filesystem::path dir);

  bool is_set() const { return set_; }
  // Error kConfig names the first thing in the folder that has one of our names and is not an empty folder. For a
  // folder that has no mark.
  void check_free() const;
  void set();

  // Whether `name` is there and is what a run wrote.
  bool owns(const std::string& name) const;
  // Remembers that `name` is ours with this fingerprint too. Error kIo.
  void announce(const std::string& name, const std::string& fingerprint);
  // Forgets the other fingerprints of `name`, all when it is not there. Error kIo.
  void settle(const std::string& name);

 private:
  void write() const;

  std::filesystem::path dir_;
  bool set_ = false;
  std::string id_;
  std::map<std::string, std::vector<std::string>> own_;
};

// Folder of the mark, the lock and what is being written, in a run's folder.
std::filesystem::path private_folder(const std::filesystem::path& dir);

// Of a file, or of the names and files of a folder; "" when nothing is there. Of a file over 16 MiB the size, both ends
// and 64 places between them count. Links are not followed inside a folder. Error kIo.
std::string fingerprint_of(const std::filesystem::path& path);

}  // namespace tessera::train
