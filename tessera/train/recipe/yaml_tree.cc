#include "tessera/train/recipe/yaml_tree.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/parser.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <sstream>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"

namespace tessera::train {
namespace {

// Returns what a text adds to the node count that kYamlLimitNodes limits: one per 64 bytes, in addition to one for the
// node that has the text. Without this, many aliases of a long text would use much memory but count as few nodes.
size_t weight_of_text(const std::string& text) { return text.size() / 64; }

size_t weight_of(const YamlNode& node) {
  size_t weight = 1 + weight_of_text(node.text);
  for (const auto& item : node.items) weight += weight_of(item);
  for (const auto& [key, value] : node.entries) weight += weight_of_text(key) + weight_of(value);
  return weight;
}

size_t depth_of(const YamlNode& node) {
  size_t deepest = 0;
  for (const auto& item : node.items) deepest = std::max(deepest, depth_of(item));
  for (const auto& [key, value] : node.entries) deepest = std::max(deepest, depth_of(value));
  return deepest + 1;
}

// Builds the tree from events. `open_` is the path of sequences and mappings from the root to the current event; a
// node is attached to its parent when it is complete. An anchored node is copied into `anchors_`, an alias copies it
// from there into the tree. Every copy is added to `nodes_` before it is made, so that memory stays proportional to
// kYamlLimitNodes however the aliases are nested.
class TreeBuilder : public YAML::EventHandler {
 public:
  explicit TreeBuilder(const std::string& source) : source_(source) {}
  YamlNode take_root() { return std::move(root_); }

  // Events of yaml-cpp. Tags: "?" is a plain scalar, "!" a quoted one; any other tag is refused.

  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}

  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override { add({.line = line_of(mark)}, anchor); }

  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& text) override {
    refuse_tag(mark, tag);
    add({.kind = YamlNode::Kind::kScalar, .text = text, .quoted = tag == "!", .line = line_of(mark)}, anchor);
  }

  void OnAlias(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    const auto found = anchors_.find(anchor);
    TESSERA_CHECK(found != anchors_.end(), ErrorKind::kConfig, "[train.recipe] {}:{}: an alias inside its own anchor",
                  source_, line_of(mark));
    // An alias is replaced by a copy of the anchored node. The number of nodes in the copy (`weight`) and its depth are
    // known, so kYamlLimitNodes and kYamlLimitDepth are checked before the copy is made. The copied node gets the line
    // of the alias; nodes inside it keep the lines of the anchored node.
    add_weight(found->second.weight, line_of(mark));
    check_depth(found->second.depth, line_of(mark));
    YamlNode copy = found->second.node;
    copy.line = line_of(mark);
    attach(std::move(copy));
  }

  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    open(mark, tag, anchor, YamlNode::Kind::kSequence);
  }
  void OnSequenceEnd() override { close(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    open(mark, tag, anchor, YamlNode::Kind::kMapping);
  }
  void OnMapEnd() override { close(); }

 private:
  struct OpenContainer {
    YamlNode node;
    YAML::anchor_t anchor;
    std::optional<std::string> key;           // for a mapping: the key whose value comes next
    std::set<std::string, std::less<>> keys;  // for a mapping: all keys so far
  };
  struct Anchored {
    YamlNode node;
    size_t weight;
    size_t depth;
  };

  static int line_of(const YAML::Mark& mark) { return mark.line + 1; }

  void refuse_tag(const YAML::Mark& mark, const std::string& tag) const {
    TESSERA_CHECK(tag.empty() || tag == "?" || tag == "!", ErrorKind::kConfig,
                  "[train.recipe] {}:{}: tag {}: a recipe has no tags. Remove it.", source_, line_of(mark), quote(tag));
  }

  void add_weight(size_t weight, int line) {
    nodes_ += weight;
    TESSERA_CHECK(nodes_ <= kYamlLimitNodes, ErrorKind::kConfig,
                  "[train.recipe] {}:{}: more than {} values once its aliases are expanded", source_, line,
                  kYamlLimitNodes);
  }

  void check_depth(size_t more, int line) const {
    TESSERA_CHECK(open_.size() + more <= kYamlLimitDepth, ErrorKind::kConfig,
                  "[train.recipe] {}:{}: nested deeper than {} levels", source_, line, kYamlLimitDepth);
  }

  void open(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor, YamlNode::Kind kind) {
    refuse_tag(mark, tag);
    add_weight(1, line_of(mark));
    check_depth(1, line_of(mark));
    open_.push_back({.node = {.kind = kind, .line = line_of(mark)}, .anchor = anchor, .key = {}, .keys = {}});
  }

  void close() {
    OpenContainer done = std::move(open_.back());
    open_.pop_back();
    store_anchor(done.node, done.anchor);
    attach(std::move(done.node));
  }

  void add(YamlNode node, YAML::anchor_t anchor) {
    add_weight(weight_of(node), node.line);
    store_anchor(node, anchor);
    attach(std::move(node));
  }

  // Stores a copy of an anchored node. It is called when the node is complete, so an alias inside its own anchor finds
  // no entry and is refused; trees cannot become cyclic.
  void store_anchor(const YamlNode& node, YAML::anchor_t anchor) {
    if (!anchor) return;
    const size_t weight = weight_of(node);
    add_weight(weight, node.line);  // the copy in `anchors_` takes memory, too
    anchors_[anchor] = {node, weight, depth_of(node)};
  }

  // Attaches a complete node to the innermost open container. In a mapping, nodes are keys and values in turn.
  void attach(YamlNode node) {
    if (open_.empty()) {
      root_ = std::move(node);
      return;
    }
    OpenContainer& parent = open_.back();
    if (parent.node.kind == YamlNode::Kind::kSequence) {
      parent.node.items.push_back(std::move(node));
    } else if (parent.key) {
      parent.node.entries.emplace_back(std::move(*parent.key), std::move(node));
      parent.key.reset();
    } else {
      TESSERA_CHECK(node.kind == YamlNode::Kind::kScalar, ErrorKind::kConfig,
                    "[train.recipe] {}:{}: a key must be a word, found a list, mapping or null", source_, node.line);
      TESSERA_CHECK(parent.keys.insert(node.text).second, ErrorKind::kConfig, "[train.recipe] {}:{}: key {} twice",
                    source_, node.line, quote(node.text));
      parent.key = std::move(node.text);
    }
  }

  const std::string& source_;
  YamlNode root_;
  std::vector<OpenContainer> open_;
  std::map<YAML::anchor_t, Anchored> anchors_;
  size_t nodes_ = 0;
};

}  // namespace

YamlNode parse_yaml(std::string_view text, const std::string& source) {
  TESSERA_CHECK(text.size() <= kYamlLimitBytes, ErrorKind::kConfig,
                "[train.recipe] {}: {} bytes, at most {} are read. Is this the recipe?", source, text.size(),
                kYamlLimitBytes);
  TESSERA_CHECK(text.find('\0') == text.npos, ErrorKind::kConfig,
                "[train.recipe] {}: holds a NUL byte: not YAML. Is this the recipe?", source);
  // yaml-cpp stops after the first document, so a second call of HandleNextDocument() finds out whether there is a
  // second document. The lines in yaml-cpp's errors count from 0.
  std::istringstream stream{std::string(text)};
  try {
    YAML::Parser parser(stream);
    TreeBuilder builder(source);
    if (!parser.HandleNextDocument(builder)) return {};
    YamlNode root = builder.take_root();
    TreeBuilder second_document(source);
    TESSERA_CHECK(!parser.HandleNextDocument(second_document), ErrorKind::kConfig,
                  "[train.recipe] {}: more than one YAML document. Keep one.", source);
    return root;
  } catch (const YAML::Exception& error) {
    raise(ErrorKind::kConfig, "[train.recipe] {}:{}: not YAML: {}", source, error.mark.line + 1, quote(error.msg));
  }
}

}  // namespace tessera::train
