#include "onnxruntime/router.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <iterator>

#include "node/node.h"

namespace dynamo_moe::onnxruntime {
namespace {

static_assert(std::size(format::kScoringNames) == kScorings);

constexpr float kTiny = 1e-20F;

bool RanksHigher(float a, float b) { return a > b || (std::isnan(a) && !std::isnan(b)); }

// Inserts an index into the `count` best ones before it, at most `most`, and returns their number.
// Those that came first stay ahead of their equals.
std::uint32_t Insert(const float* ranked, std::int32_t index, std::uint32_t count,
                     std::uint32_t most, std::int32_t* best) {
  std::uint32_t place = count;
  while (place > 0 && RanksHigher(ranked[index], ranked[best[place - 1]])) {
    --place;
  }
  if (place == most) {
    return count;
  }
  const std::uint32_t now = std::min(count + 1, most);
  for (std::uint32_t i = now - 1; i > place; --i) {
    best[i] = best[i - 1];
  }
  best[place] = index;
  return now;
}

}  // namespace

bool RanksByLogits(const dynamo_moe_layer& layer) {
  return layer.scoring == kTopkSoftmax ||
         (layer.scoring == kSigmoid && layer.selection_dtype == format::kNone &&
          layer.group_scoring == format::kNoGroups);
}

Chooser::Chooser(const dynamo_moe_layer& layer, const float* selection_bias)
    : layer_(layer),
      selection_bias_(selection_bias),
      biased_(selection_bias == nullptr ? 0 : layer.experts) {
  if (layer.group_scoring != format::kNoGroups) {
    group_scores_.resize(layer.n_group);
    best_groups_.resize(layer.topk_group);
    within_.resize(layer.n_group);
  }
}

void Chooser::ChooseGroups(const float* order) {
  const std::uint32_t size = layer_.experts / layer_.n_group;
  std::uint32_t chosen = 0;
  for (std::uint32_t group = 0; group < layer_.n_group; ++group) {
    const float* const scores = order + std::size_t{group} * size;
    std::int32_t top[2] = {};
    std::uint32_t found = 0;
    for (std::uint32_t i = 0; i < size; ++i) {
      found = Insert(scores, static_cast<std::int32_t>(i), found, 2, top);
    }
    const bool two = layer_.group_scoring == format::kTop2Sum;
    group_scores_[group] = two ? scores[top[0]] + scores[top[1]] : scores[top[0]];
    chosen = Insert(group_scores_.data(), static_cast<std::int32_t>(group), chosen,
                    layer_.topk_group, best_groups_.data());
  }
  within_.assign(layer_.n_group, false);
  for (const std::int32_t group : best_groups_) {
    within_[static_cast<std::size_t>(group)] = true;
  }
}

void Chooser::operator()(const float* logits, const float* scores, std::int32_t* ids,
                         float* weights) {
  const std::uint32_t experts = layer_.experts;
  const std::uint32_t top_k = layer_.top_k;
  const bool by_logits = scores == nullptr;
  const float* const plain = by_logits ? logits : scores;
  const float* order = plain;
  if (selection_bias_ != nullptr) {
    std::transform(plain, plain + experts, selection_bias_, biased_.begin(), std::plus<>());
    order = biased_.data();
  }
  const bool groups = layer_.group_scoring != format::kNoGroups;
  const std::uint32_t group_size = groups ? experts / layer_.n_group : experts;
  if (groups) {
    ChooseGroups(order);
  }
  std::uint32_t chosen = 0;
  for (std::uint32_t expert = 0; expert < experts; ++expert) {
    if (!groups || within_[expert / group_size]) {
      chosen = Insert(order, static_cast<std::int32_t>(expert), chosen, top_k, ids);
    }
  }
  // The selection bias may rank another one first.
  float highest = plain[ids[0]];
  for (std::uint32_t k = 1; k < top_k; ++k) {
    highest = plain[ids[k]] > highest ? plain[ids[k]] : highest;
  }
  float sum = 0;
  for (std::uint32_t k = 0; k < top_k; ++k) {
    weights[k] = plain[ids[k]];
    if (layer_.scoring == kTopkSoftmax) {
      weights[k] = std::exp(weights[k] - highest);
    } else if (by_logits) {
      weights[k] = 1 / (1 + std::exp(-weights[k]));
    }
    sum += weights[k];
  }
  if (layer_.scoring != kTopkSoftmax) {
    sum = HasFlag(layer_, format::kRenormalize) ? sum + kTiny : 1;
  }
  for (std::uint32_t k = 0; k < top_k; ++k) {
    weights[k] = weights[k] / sum * layer_.routed_scaling;
  }
}

}  // namespace dynamo_moe::onnxruntime
