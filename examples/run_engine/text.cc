#include "text.h"

#include <algorithm>
#include <utility>

namespace run_engine {

Text::Text(const std::vector<Ids>& prompts, Ids ends) : ends_(std::move(ends)) {
  for (const Ids& prompt : prompts) {
    prompt_length_ = std::max(prompt_length_, prompt.size());
  }
  for (const Ids& prompt : prompts) {
    const std::size_t padding = prompt_length_ - prompt.size();
    Ids ids(padding, 0);
    ids.insert(ids.end(), prompt.begin(), prompt.end());
    rows_.push_back({std::move(ids), padding, 0});
  }
}

bool Text::has_ended() const {
  return std::all_of(rows_.begin(), rows_.end(), [](const Row& row) { return row.end != 0; });
}

Text::Ids Text::ids(std::size_t begin) const {
  Ids ids;
  for (const Row& row : rows_) {
    ids.insert(ids.end(), row.ids.begin() + static_cast<std::ptrdiff_t>(begin), row.ids.end());
  }
  return ids;
}

Text::Ids Text::positions(std::size_t begin) const {
  Ids positions;
  for (const Row& row : rows_) {
    for (std::size_t at = begin; at < length(); ++at) {
      positions.push_back(static_cast<std::int64_t>(at - std::min(at, row.padding)));
    }
  }
  return positions;
}

Text::Ids Text::mask(std::size_t row_length) const {
  Ids mask;
  for (const Row& row : rows_) {
    mask.insert(mask.end(), row.padding, 0);
    mask.insert(mask.end(), length() - row.padding, 1);
    mask.insert(mask.end(), row_length - length(), 0);
  }
  return mask;
}

void Text::append(const Ids& tokens) {
  for (std::size_t at = 0; at < rows(); ++at) {
    Row& row = rows_[at];
    if (row.end != 0) {
      row.ids.push_back(ends_.front());
      continue;
    }
    row.ids.push_back(tokens[at]);
    if (std::find(ends_.begin(), ends_.end(), tokens[at]) != ends_.end()) {
      row.end = row.ids.size();
    }
  }
}

Text::Ids Text::written(std::size_t row) const {
  const auto& [ids, padding, end] = rows_.at(row);
  return {ids.begin() + static_cast<std::ptrdiff_t>(prompt_length_),
          end == 0 ? ids.end() : ids.begin() + static_cast<std::ptrdiff_t>(end)};
}

}  // namespace run_engine
