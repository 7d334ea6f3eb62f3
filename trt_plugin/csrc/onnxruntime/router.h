// A token's experts and their weights, from its scores.
//
// Legend: E experts, K experts per token.
#pragma once

#include <cstdint>
#include <vector>

#include "bundle/layer.h"

namespace dynamo_moe::onnxruntime {

// How experts are scored, by the codes of format::kScoringNames.
enum Scoring : std::uint32_t { kSoftmax, kTopkSoftmax, kSigmoid, kScorings };

// Whether experts are ranked by their logits alone.
bool RanksByLogits(const dynamo_moe_layer& layer);

// Chooses a token's K experts. A NaN ranks first; of equal scores, the lower expert does. Each
// thread has its own.
class Chooser {
 public:
  // The bias, of E experts, may be null.
  Chooser(const dynamo_moe_layer& layer, const float* selection_bias);

  // Scores are the softmax of the logits, or their sigmoids; null if RanksByLogits.
  void operator()(const float* logits, const float* scores, std::int32_t* ids, float* weights);

 private:
  // Finds the groups whose experts may be chosen.
  void ChooseGroups(const float* order);

  const dynamo_moe_layer& layer_;
  const float* selection_bias_;
  std::vector<float> biased_;
  std::vector<float> group_scores_;
  std::vector<std::int32_t> best_groups_;
  std::vector<bool> within_;
};

}  // namespace dynamo_moe::onnxruntime
