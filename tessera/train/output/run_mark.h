// The mark of a run's folder: the file .tessera/run.json, which shows that the folder belongs to a run. The
// mark also stores fingerprints of files whose names a user may want to use (recipe.yaml, model/), so that a run
// replaces such a file only if a run wrote it. See docs/format/run.md.
//
//   RunMark mark(dir);                                // reads .tessera/run.json
//   mark.check_names_unused();                        // no file of a user has a name that a run writes
//   mark.set();
//   mark.add_fingerprint("recipe.yaml", fingerprint); // before the file is replaced
//   mark.keep_current_fingerprint("recipe.yaml");     // after the file is replaced
//   if (mark.owns("recipe.yaml")) ...                 // the file is unchanged since a run wrote it
//
// Not thread-safe; other processes are excluded by the lock of the folder (RunFolder).
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace tessera::train {

class RunMark {
 public:
  // Reads the mark of the folder `dir` if the folder has one. Error kFormat when .tessera/run.json is not the mark of a
  // run.
  explicit RunMark(std::filesystem::path dir);

  bool is_set() const { return set_; }
  // Checks that a run may use a folder that has no mark yet; must not be called for a folder with a mark. Error kConfig
  // if a name that a run writes is in use; the message gives the first such path. Empty folders under these names are
  // allowed, and so are files in .tessera that a run left when it was killed before it wrote its mark.
  void check_names_unused() const;
  // Writes the mark if there is none. Error kIo.
  void set();

  // Whether the file or folder `name` in the run's folder exists and its present content is what a run wrote, by a
  // stored fingerprint.
  bool owns(const std::string& name) const;
  // Stores one more fingerprint for `name`: if the content of `name` has this fingerprint, owns() returns true. Error
  // kIo.
  void add_fingerprint(const std::string& name, const std::string& fingerprint);
  // Removes the stored fingerprints of the file or folder `name`, except the fingerprint of its present content.
  // Removes all of them if `name` does not exist. Error kIo.
  void keep_current_fingerprint(const std::string& name);

 private:
  void write() const;

  std::filesystem::path dir_;
  bool set_ = false;
  std::string id_;
  std::map<std::string, std::vector<std::string>> fingerprints_;
};

// The folder .tessera of a run's folder, which holds mark, lock and staging files.
std::filesystem::path private_folder(const std::filesystem::path& dir);

// A hash of a file, or of the names and files of a folder; "" if `path` does not exist. For a file above 16 MiB the
// hash covers the size and 67 blocks of 4 KiB: 66 at equal distances from the start, and the last one. Links in a
// folder are not followed. Error kIo.
std::string fingerprint_of(const std::filesystem::path& path);

}  // namespace tessera::train
