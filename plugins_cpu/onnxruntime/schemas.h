// Generated from the operators' schemas (kvc_trt/operators) by `python -m plugins_cpu.generate`; edit those.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "onnxruntime/abi.h"

namespace kvc {

/// What Python and the library agree on.
inline constexpr int32_t kInterface = 1330849715;

inline constexpr const char* kDomain = "kvc";

/// What the dimensions of tensors stand for.
enum class Symbol : uint8_t {
    kBatch,          ///< B
    kHeads,          ///< H
    kWindow,         ///< W
    kHeadSize,       ///< D
    kKvHeads,        ///< G
    kPromptLength,   ///< S
    kCapacity,       ///< C
    kTwiceHeadSize,  ///< 2D
    kPages,          ///< P
    kSymbolN,        ///< N
    kSymbolDOver2,   ///< D/2
    kSelectedWidth,  ///< K
    kSymbolL,        ///< L
    kSymbolT,        ///< T
    kSymbolIn,       ///< In
    kSymbolOut,      ///< Out
    kSymbolBlocks,   ///< Blocks
    kSymbolBytes,    ///< Bytes
    kSymbolR,        ///< R
};
inline constexpr size_t kSymbols = 19;

/// In messages.
inline constexpr const char* kSymbolNames[kSymbols] = {"batch",    "heads",
                                                       "window",   "head size",
                                                       "kv heads", "prompt length",
                                                       "capacity", "2 x head size",
                                                       "pages",    "N",
                                                       "D/2",      "selected width",
                                                       "L",        "T",
                                                       "In",       "Out",
                                                       "Blocks",   "Bytes",
                                                       "R"};

inline constexpr size_t kMaxTensors = 9;
inline constexpr size_t kMaxRank = 4;

struct TensorSpec {
    const char* name;
    ort::ElementType type;
    bool optional;
    std::span<const Symbol> shape;
};

/// The inputs and outputs of an operator, in the order of a node's.
struct Schema {
    const char* name;
    std::span<const TensorSpec> inputs;
    std::span<const TensorSpec> outputs;
};

namespace schemas {

inline constexpr Symbol kShape_B_H_W_D[] = {Symbol::kBatch, Symbol::kHeads, Symbol::kWindow, Symbol::kHeadSize};
inline constexpr Symbol kShape_B_G_S_D[] = {Symbol::kBatch, Symbol::kKvHeads, Symbol::kPromptLength, Symbol::kHeadSize};
inline constexpr Symbol kShape_B[] = {Symbol::kBatch};
inline constexpr Symbol kShape_B_G_C_D[] = {Symbol::kBatch, Symbol::kKvHeads, Symbol::kCapacity, Symbol::kHeadSize};
inline constexpr Symbol kShape_B_G_2D_P[] = {Symbol::kBatch, Symbol::kKvHeads, Symbol::kTwiceHeadSize, Symbol::kPages};
inline constexpr Symbol kShape_B_G_C[] = {Symbol::kBatch, Symbol::kKvHeads, Symbol::kCapacity};
inline constexpr Symbol kShape_B_H_D[] = {Symbol::kBatch, Symbol::kHeads, Symbol::kHeadSize};
inline constexpr Symbol kShape_B_H_D_D[] = {Symbol::kBatch, Symbol::kHeads, Symbol::kHeadSize, Symbol::kHeadSize};
inline constexpr Symbol kShape_B_H_S_D[] = {Symbol::kBatch, Symbol::kHeads, Symbol::kPromptLength, Symbol::kHeadSize};
inline constexpr Symbol kShape_B_G_N_D[] = {Symbol::kBatch, Symbol::kKvHeads, Symbol::kSymbolN, Symbol::kHeadSize};
inline constexpr Symbol kShape_B_G_N[] = {Symbol::kBatch, Symbol::kKvHeads, Symbol::kSymbolN};
inline constexpr Symbol kShape_B_G_D[] = {Symbol::kBatch, Symbol::kKvHeads, Symbol::kHeadSize};
inline constexpr Symbol kShape_B_S_H_D[] = {Symbol::kBatch, Symbol::kPromptLength, Symbol::kHeads, Symbol::kHeadSize};
inline constexpr Symbol kShape_B_DOver2[] = {Symbol::kBatch, Symbol::kSymbolDOver2};
inline constexpr Symbol kShape_B_G_K[] = {Symbol::kBatch, Symbol::kKvHeads, Symbol::kSelectedWidth};
inline constexpr Symbol kShape_L_B[] = {Symbol::kSymbolL, Symbol::kBatch};
inline constexpr Symbol kShape_T_In[] = {Symbol::kSymbolT, Symbol::kSymbolIn};
inline constexpr Symbol kShape_Out_Blocks_Bytes[] = {Symbol::kSymbolOut, Symbol::kSymbolBlocks, Symbol::kSymbolBytes};
inline constexpr Symbol kShape_Out_Blocks[] = {Symbol::kSymbolOut, Symbol::kSymbolBlocks};
inline constexpr Symbol kShape_T_Out[] = {Symbol::kSymbolT, Symbol::kSymbolOut};
inline constexpr Symbol kShape_T[] = {Symbol::kSymbolT};
inline constexpr Symbol kShape_B_H_K[] = {Symbol::kBatch, Symbol::kHeads, Symbol::kSelectedWidth};
inline constexpr Symbol kShape_R_DOver2[] = {Symbol::kSymbolR, Symbol::kSymbolDOver2};
inline constexpr Symbol kShape_B_G_D_C[] = {Symbol::kBatch, Symbol::kKvHeads, Symbol::kHeadSize, Symbol::kCapacity};

// Keep the part of a prompt's cache that its last queries look at.
inline constexpr TensorSpec kKvcCompactInputs[] = {{"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
                                                   {"k", ort::ElementType::kFloat, false, kShape_B_G_S_D},
                                                   {"v", ort::ElementType::kFloat, false, kShape_B_G_S_D},
                                                   {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcCompactOutputs[] = {{"k_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
                                                    {"v_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
                                                    {"bounds", ort::ElementType::kFloat, true, kShape_B_G_2D_P},
                                                    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
                                                    {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr Schema kKvcCompact{"KvcCompact", kKvcCompactInputs, kKvcCompactOutputs};

// Keep the tokens of a prompt that queries to come can be expected to attend to.
inline constexpr TensorSpec kKvcCompactExpectedAttentionInputs[] = {
    {"query_mean", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"query_covariance", ort::ElementType::kFloat, false, kShape_B_H_D_D},
    {"k", ort::ElementType::kFloat, false, kShape_B_G_S_D},
    {"v", ort::ElementType::kFloat, false, kShape_B_G_S_D},
    {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcCompactExpectedAttentionOutputs[] = {
    {"k_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"v_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"bounds", ort::ElementType::kFloat, false, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr Schema kKvcCompactExpectedAttention{"KvcCompactExpectedAttention", kKvcCompactExpectedAttentionInputs,
                                                     kKvcCompactExpectedAttentionOutputs};

// Keep the last tokens of a prompt, and of the others those that received most attention.
inline constexpr TensorSpec kKvcCompactHeavyHittersInputs[] = {
    {"q", ort::ElementType::kFloat, false, kShape_B_H_S_D},
    {"k", ort::ElementType::kFloat, false, kShape_B_G_S_D},
    {"v", ort::ElementType::kFloat, false, kShape_B_G_S_D},
    {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcCompactHeavyHittersOutputs[] = {
    {"k_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"v_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"scores", ort::ElementType::kFloat, false, kShape_B_G_C},
    {"slot_positions", ort::ElementType::kInt32, false, kShape_B_G_C},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr Schema kKvcCompactHeavyHitters{"KvcCompactHeavyHitters", kKvcCompactHeavyHittersInputs,
                                                kKvcCompactHeavyHittersOutputs};

// Keep the tokens of a prompt whose keys differ most from the mean direction of all keys.
inline constexpr TensorSpec kKvcCompactKeydiffInputs[] = {
    {"k", ort::ElementType::kFloat, false, kShape_B_G_S_D},
    {"v", ort::ElementType::kFloat, false, kShape_B_G_S_D},
    {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcCompactKeydiffOutputs[] = {{"k_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
                                                           {"v_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
                                                           {"bounds", ort::ElementType::kFloat, false, kShape_B_G_2D_P},
                                                           {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
                                                           {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr Schema kKvcCompactKeydiff{"KvcCompactKeydiff", kKvcCompactKeydiffInputs, kKvcCompactKeydiffOutputs};

// KvcCompact for a layer whose budget is not known yet.
inline constexpr TensorSpec kKvcCompactRankedInputs[] = {{"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
                                                         {"k", ort::ElementType::kFloat, false, kShape_B_G_S_D},
                                                         {"v", ort::ElementType::kFloat, false, kShape_B_G_S_D},
                                                         {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcCompactRankedOutputs[] = {{"k_kept", ort::ElementType::kFloat, false, kShape_B_G_N_D},
                                                          {"v_kept", ort::ElementType::kFloat, false, kShape_B_G_N_D},
                                                          {"kept", ort::ElementType::kInt64, false, kShape_B_G_N},
                                                          {"ranks", ort::ElementType::kInt64, false, kShape_B_G_N}};
inline constexpr Schema kKvcCompactRanked{"KvcCompactRanked", kKvcCompactRankedInputs, kKvcCompactRankedOutputs};

// Cut what KvcCompactRanked kept to a layer's budget.
inline constexpr TensorSpec kKvcTrimInputs[] = {{"k_kept", ort::ElementType::kFloat, false, kShape_B_G_N_D},
                                                {"v_kept", ort::ElementType::kFloat, false, kShape_B_G_N_D},
                                                {"kept", ort::ElementType::kInt64, false, kShape_B_G_N},
                                                {"ranks", ort::ElementType::kInt64, false, kShape_B_G_N},
                                                {"budgets", ort::ElementType::kInt64, false, kShape_B},
                                                {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcTrimOutputs[] = {{"k_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
                                                 {"v_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
                                                 {"bounds", ort::ElementType::kFloat, false, kShape_B_G_2D_P},
                                                 {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
                                                 {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr Schema kKvcTrim{"KvcTrim", kKvcTrimInputs, kKvcTrimOutputs};

// Keep the last tokens of a prompt, and of the others those that its last query looks at most.
inline constexpr TensorSpec kKvcCompactTovaInputs[] = {{"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
                                                       {"k", ort::ElementType::kFloat, false, kShape_B_G_S_D},
                                                       {"v", ort::ElementType::kFloat, false, kShape_B_G_S_D},
                                                       {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcCompactTovaOutputs[] = {
    {"k_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"v_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"slot_positions", ort::ElementType::kInt32, false, kShape_B_G_C},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr Schema kKvcCompactTova{"KvcCompactTova", kKvcCompactTovaInputs, kKvcCompactTovaOutputs};

// Append one token, attend to every entry.
inline constexpr TensorSpec kKvcDenseAttentionInputs[] = {{"query", ort::ElementType::kFloat, false, kShape_B_H_D},
                                                          {"k_new", ort::ElementType::kFloat, false, kShape_B_G_D},
                                                          {"v_new", ort::ElementType::kFloat, false, kShape_B_G_D},
                                                          {"k_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
                                                          {"v_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
                                                          {"cache_lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcDenseAttentionOutputs[] = {
    {"output", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"k_cache_out", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"v_cache_out", ort::ElementType::kFloat, false, kShape_B_G_C_D}};
inline constexpr Schema kKvcDenseAttention{"KvcDenseAttention", kKvcDenseAttentionInputs, kKvcDenseAttentionOutputs};

// Mean and covariance of the queries that are expected after a prompt, head by head.
inline constexpr TensorSpec kKvcExpectedQueriesInputs[] = {
    {"plain_queries", ort::ElementType::kFloat, false, kShape_B_S_H_D},
    {"future_cosine", ort::ElementType::kFloat, false, kShape_B_DOver2},
    {"future_sine", ort::ElementType::kFloat, false, kShape_B_DOver2},
    {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcExpectedQueriesOutputs[] = {
    {"query_mean", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"query_covariance", ort::ElementType::kFloat, false, kShape_B_H_D_D}};
inline constexpr Schema kKvcExpectedQueries{"KvcExpectedQueries", kKvcExpectedQueriesInputs,
                                            kKvcExpectedQueriesOutputs};

// Append one token, attend to every entry, drop the one that received least attention.
inline constexpr TensorSpec kKvcHeavyHitterAttentionInputs[] = {
    {"query", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"k_new", ort::ElementType::kFloat, false, kShape_B_G_D},
    {"v_new", ort::ElementType::kFloat, false, kShape_B_G_D},
    {"k_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"v_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"scores", ort::ElementType::kFloat, false, kShape_B_G_C},
    {"slot_positions", ort::ElementType::kInt32, false, kShape_B_G_C},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"positions", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcHeavyHitterAttentionOutputs[] = {
    {"output", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"k_cache_out", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"v_cache_out", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"scores_out", ort::ElementType::kFloat, false, kShape_B_G_C},
    {"slot_positions_out", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr Schema kKvcHeavyHitterAttention{"KvcHeavyHitterAttention", kKvcHeavyHitterAttentionInputs,
                                                 kKvcHeavyHitterAttentionOutputs};

// Append one token, select the pages that matter, attend to their tokens.
inline constexpr TensorSpec kKvcHybridAttentionInputs[] = {
    {"query", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"k_new", ort::ElementType::kFloat, false, kShape_B_G_D},
    {"v_new", ort::ElementType::kFloat, false, kShape_B_G_D},
    {"k_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"v_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"bounds", ort::ElementType::kFloat, false, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcHybridAttentionOutputs[] = {
    {"output", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"k_cache_out", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"v_cache_out", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"bounds_out", ort::ElementType::kFloat, false, kShape_B_G_2D_P},
    {"selected", ort::ElementType::kInt32, true, kShape_B_G_K}};
inline constexpr Schema kKvcHybridAttention{"KvcHybridAttention", kKvcHybridAttentionInputs,
                                            kKvcHybridAttentionOutputs};

// How much of one prompt each layer keeps.
inline constexpr TensorSpec kKvcLayerBudgetsInputs[] = {{"cosines", ort::ElementType::kFloat, false, kShape_L_B},
                                                        {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcLayerBudgetsOutputs[] = {{"budgets", ort::ElementType::kInt64, false, kShape_L_B}};
inline constexpr Schema kKvcLayerBudgets{"KvcLayerBudgets", kKvcLayerBudgetsInputs, kKvcLayerBudgetsOutputs};

// Exact causal attention over the prompt, in memory linear in its length.
inline constexpr TensorSpec kKvcPrefillAttentionInputs[] = {{"q", ort::ElementType::kFloat, false, kShape_B_H_S_D},
                                                            {"k", ort::ElementType::kFloat, false, kShape_B_G_S_D},
                                                            {"v", ort::ElementType::kFloat, false, kShape_B_G_S_D}};
inline constexpr TensorSpec kKvcPrefillAttentionOutputs[] = {{"o", ort::ElementType::kFloat, false, kShape_B_H_S_D}};
inline constexpr Schema kKvcPrefillAttention{"KvcPrefillAttention", kKvcPrefillAttentionInputs,
                                             kKvcPrefillAttentionOutputs};

// Product with a matrix in 4 or 8 bits; the input is rounded to 8 bits.
inline constexpr TensorSpec kKvcQuantisedLinearInputs[] = {
    {"x", ort::ElementType::kFloat, false, kShape_T_In},
    {"packed", ort::ElementType::kUint8, false, kShape_Out_Blocks_Bytes},
    {"scales", ort::ElementType::kFloat16, false, kShape_Out_Blocks}};
inline constexpr TensorSpec kKvcQuantisedLinearOutputs[] = {{"y", ort::ElementType::kFloat, false, kShape_T_Out}};
inline constexpr Schema kKvcQuantisedLinear{"KvcQuantisedLinear", kKvcQuantisedLinearInputs,
                                            kKvcQuantisedLinearOutputs};

// Rows of a matrix in 4 or 8 bits, exactly as stored: an embedding table that is also the head.
inline constexpr TensorSpec kKvcQuantisedRowsInputs[] = {
    {"rows", ort::ElementType::kInt64, false, kShape_T},
    {"packed", ort::ElementType::kUint8, false, kShape_Out_Blocks_Bytes},
    {"scales", ort::ElementType::kFloat16, false, kShape_Out_Blocks}};
inline constexpr TensorSpec kKvcQuantisedRowsOutputs[] = {{"y", ort::ElementType::kFloat, false, kShape_T_In}};
inline constexpr Schema kKvcQuantisedRows{"KvcQuantisedRows", kKvcQuantisedRowsInputs, kKvcQuantisedRowsOutputs};

// Append one token, attend to the pages whose bounds promise most, per query head.
inline constexpr TensorSpec kKvcQuestAttentionInputs[] = {{"query", ort::ElementType::kFloat, false, kShape_B_H_D},
                                                          {"k_new", ort::ElementType::kFloat, false, kShape_B_G_D},
                                                          {"v_new", ort::ElementType::kFloat, false, kShape_B_G_D},
                                                          {"k_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
                                                          {"v_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
                                                          {"bounds", ort::ElementType::kFloat, false, kShape_B_G_2D_P},
                                                          {"cache_lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcQuestAttentionOutputs[] = {
    {"output", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"k_cache_out", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"v_cache_out", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"bounds_out", ort::ElementType::kFloat, false, kShape_B_G_2D_P},
    {"selected", ort::ElementType::kInt32, false, kShape_B_H_K}};
inline constexpr Schema kKvcQuestAttention{"KvcQuestAttention", kKvcQuestAttentionInputs, kKvcQuestAttentionOutputs};

// Write one token over the oldest that is no sink, attend to all entries.
inline constexpr TensorSpec kKvcRecentAttentionInputs[] = {
    {"query", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"k_new", ort::ElementType::kFloat, false, kShape_B_G_D},
    {"v_new", ort::ElementType::kFloat, false, kShape_B_G_D},
    {"k_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"v_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcRecentAttentionOutputs[] = {
    {"output", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"k_cache_out", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"v_cache_out", ort::ElementType::kFloat, false, kShape_B_G_C_D}};
inline constexpr Schema kKvcRecentAttention{"KvcRecentAttention", kKvcRecentAttentionInputs,
                                            kKvcRecentAttentionOutputs};

// KvcRecentAttention with positions counted in the cache.
inline constexpr TensorSpec kKvcRankedRecentAttentionInputs[] = {
    {"query", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"k_new", ort::ElementType::kFloat, false, kShape_B_G_D},
    {"v_new", ort::ElementType::kFloat, false, kShape_B_G_D},
    {"k_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"v_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"cosine", ort::ElementType::kFloat, false, kShape_R_DOver2},
    {"sine", ort::ElementType::kFloat, false, kShape_R_DOver2}};
inline constexpr TensorSpec kKvcRankedRecentAttentionOutputs[] = {
    {"output", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"k_cache_out", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"v_cache_out", ort::ElementType::kFloat, false, kShape_B_G_C_D}};
inline constexpr Schema kKvcRankedRecentAttention{"KvcRankedRecentAttention", kKvcRankedRecentAttentionInputs,
                                                  kKvcRankedRecentAttentionOutputs};

// Append one token, score all by a few channels, attend to the best ones.
inline constexpr TensorSpec kKvcSparqAttentionInputs[] = {{"query", ort::ElementType::kFloat, false, kShape_B_H_D},
                                                          {"k_new", ort::ElementType::kFloat, false, kShape_B_G_D},
                                                          {"v_new", ort::ElementType::kFloat, false, kShape_B_G_D},
                                                          {"k_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
                                                          {"v_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
                                                          {"channels", ort::ElementType::kFloat, false, kShape_B_G_D_C},
                                                          {"value_sum", ort::ElementType::kFloat, false, kShape_B_G_D},
                                                          {"cache_lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcSparqAttentionOutputs[] = {
    {"output", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"k_cache_out", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"v_cache_out", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"channels_out", ort::ElementType::kFloat, false, kShape_B_G_D_C},
    {"value_sum_out", ort::ElementType::kFloat, false, kShape_B_G_D},
    {"selected", ort::ElementType::kInt32, false, kShape_B_G_K}};
inline constexpr Schema kKvcSparqAttention{"KvcSparqAttention", kKvcSparqAttentionInputs, kKvcSparqAttentionOutputs};

// Append one token, attend to every entry, drop the one this query attended to least.
inline constexpr TensorSpec kKvcTovaAttentionInputs[] = {
    {"query", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"k_new", ort::ElementType::kFloat, false, kShape_B_G_D},
    {"v_new", ort::ElementType::kFloat, false, kShape_B_G_D},
    {"k_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"v_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"slot_positions", ort::ElementType::kInt32, false, kShape_B_G_C},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"positions", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcTovaAttentionOutputs[] = {
    {"output", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"k_cache_out", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"v_cache_out", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"slot_positions_out", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr Schema kKvcTovaAttention{"KvcTovaAttention", kKvcTovaAttentionInputs, kKvcTovaAttentionOutputs};

}  // namespace schemas

}  // namespace kvc
