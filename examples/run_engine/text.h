// The token ids of a batch of prompts and of what follows them. Includes only the standard library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace run_engine {

// Rows of one length: shorter prompts have padding on their left, which the mask hides.
class Text {
 public:
  using Ids = std::vector<std::int64_t>;

  // `ends`: the tokens that end a row, of which the first follows in a row that has ended.
  Text(const std::vector<Ids>& prompts, Ids ends);

  [[nodiscard]] std::size_t rows() const { return rows_.size(); }
  // Tokens of a row, padding included.
  [[nodiscard]] std::size_t length() const { return rows_.front().ids.size(); }
  [[nodiscard]] bool has_ended() const;

  // Of the tokens from `begin` on, all rows in one.
  [[nodiscard]] Ids ids(std::size_t begin) const;
  // A token's place in its row, without the padding.
  [[nodiscard]] Ids positions(std::size_t begin) const;
  // 1 for a token and 0 for padding, and for the places after the text in rows of this length.
  [[nodiscard]] Ids mask(std::size_t row_length) const;

  // Appends a token to each row.
  void append(const Ids& tokens);
  // What follows a row's prompt, with the token that ends it.
  [[nodiscard]] Ids written(std::size_t row) const;

 private:
  struct Row {
    Ids ids;
    std::size_t padding;
    // Where its last token ends; 0: it goes on.
    std::size_t end;
  };

  std::size_t prompt_length_ = 0;
  Ids ends_;
  std::vector<Row> rows_;
};

}  // namespace run_engine
