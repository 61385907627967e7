// A program: a list of operations on fixed addresses.
#pragma once

#include "vectors.h"

namespace triptych {

enum Kind : int64_t {
  kLinear = 0,
  kNorm = 1,
  kAddNorm = 2,
  kGate = 3,
  kRotate = 4,
  kWriteCache = 5,
  kAttend = 6,
  kShrink = 7,
  kExpand = 8,
  kQuantized = 9,
  kFloatLinear = 10,
  kLayerNorm = 11,
  kAdd = 12,
  kGelu = 13,
  kAttendTexts = 14,
  kCopy = 15,
};

// One operation. The comment above its kernel explains its numbers.
struct Op {
  int64_t kind;
  // Index among the plans of a run, for operations that use the cache.
  int64_t plan;
  // Whether the next operation needs nothing of this one, so that threads without a piece of it go on.
  int64_t beside;
  void* at[6];
  int64_t n[11];
  double f[2];
};

// One step's attention for one KV group: the fields of PagedInput and numbers derived from them. Of texts without
// a cache it has the lengths, the first tokens, and the numbers of texts and of real tokens.
struct Plan {
  const int32_t* seq_lens;
  const int32_t* query_start;
  const int32_t* block_table;
  const int64_t* slot_mapping;
  int64_t table_width;
  int64_t rows;
  int64_t num_tokens;    // without padding
  int64_t total_tokens;  // with padding
  int64_t block_size;
  int64_t longest_query;  // tokens of a row; set by triptych_prepare()
  int64_t longest;        // tokens of a sequence; set by triptych_prepare()
};

// Keys of one row that one thread processes; other threads take the rest. A multiple of kPanel.
constexpr int64_t kPart = 512;

inline int64_t parts_of(const Plan& plan) { return (plan.longest + kPart - 1) / kPart; }

// Memory that the threads of a run share.
struct Scratch {
  int threads;
  float* partial;               // [rows][kv heads][parts][group][head + 2]
  std::atomic<int32_t>* parts;  // [rows][kv heads]: finished parts; 0 between runs
};

}  // namespace triptych
