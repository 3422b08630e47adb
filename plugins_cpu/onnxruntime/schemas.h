// Generated from the operators' schemas (kvc_trt/operators) by `python -m plugins_cpu.generate`; edit those.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "onnxruntime/abi.h"

namespace kvc {

/// The version of the interface that Python and the library share.
inline constexpr int32_t kInterface = 1062304839;

inline constexpr const char* kDomain = "kvc";

/// The symbols of tensor dimensions.
enum class Symbol : uint8_t {
    kBatch,             ///< B
    kHeads,             ///< H
    kWindow,            ///< W
    kHeadSize,          ///< D
    kKvHeads,           ///< G
    kPromptLength,      ///< S
    kCapacity,          ///< C
    kTwiceHeadSize,     ///< 2D
    kPages,             ///< P
    kBlock,             ///< M
    kSymbolT,           ///< T
    kSelectedWidth,     ///< K
    kCapacityAndBlock,  ///< C+M
    kSymbolIn,          ///< In
    kSymbolOut,         ///< Out
    kSymbolBlocks,      ///< Blocks
    kSymbolBytes,       ///< Bytes
};
inline constexpr size_t kSymbols = 17;

/// The symbols' names in messages.
inline constexpr const char* kSymbolNames[kSymbols] = {
    "batch",         "heads",  "window", "head size", "kv heads",       "prompt length",    "capacity",
    "2 x head size", "pages",  "block",  "T",         "selected width", "capacity + block", "In",
    "Out",           "Blocks", "Bytes"};

inline constexpr size_t kMaxTensors = 7;
inline constexpr size_t kMaxRank = 4;

struct TensorSpec {
    const char* name;
    ort::ElementType type;
    bool optional;
    std::span<const Symbol> shape;
};

/// The inputs and outputs of an operator, in the order of a node.
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
inline constexpr Symbol kShape_B_G_D[] = {Symbol::kBatch, Symbol::kKvHeads, Symbol::kHeadSize};
inline constexpr Symbol kShape_B_H_M_D[] = {Symbol::kBatch, Symbol::kHeads, Symbol::kBlock, Symbol::kHeadSize};
inline constexpr Symbol kShape_B_G_T_D[] = {Symbol::kBatch, Symbol::kKvHeads, Symbol::kSymbolT, Symbol::kHeadSize};
inline constexpr Symbol kShape_B_G_K[] = {Symbol::kBatch, Symbol::kKvHeads, Symbol::kSelectedWidth};
inline constexpr Symbol kShape_B_G_M_D[] = {Symbol::kBatch, Symbol::kKvHeads, Symbol::kBlock, Symbol::kHeadSize};
inline constexpr Symbol kShape_B_G_CAndM_D[] = {Symbol::kBatch, Symbol::kKvHeads, Symbol::kCapacityAndBlock,
                                                Symbol::kHeadSize};
inline constexpr Symbol kShape_T_In[] = {Symbol::kSymbolT, Symbol::kSymbolIn};
inline constexpr Symbol kShape_Out_Blocks_Bytes[] = {Symbol::kSymbolOut, Symbol::kSymbolBlocks, Symbol::kSymbolBytes};
inline constexpr Symbol kShape_Out_Blocks[] = {Symbol::kSymbolOut, Symbol::kSymbolBlocks};
inline constexpr Symbol kShape_T_Out[] = {Symbol::kSymbolT, Symbol::kSymbolOut};

// Keep the part of a prompt's cache that its last queries look at.
inline constexpr TensorSpec kKvcCompactInputs[] = {{"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
                                                   {"k", ort::ElementType::kFloat, false, kShape_B_G_S_D},
                                                   {"v", ort::ElementType::kFloat, false, kShape_B_G_S_D},
                                                   {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B},
                                                   {"prompt_budgets", ort::ElementType::kInt64, true, kShape_B},
                                                   {"pool_kernels", ort::ElementType::kInt64, true, kShape_B}};
inline constexpr TensorSpec kKvcCompactOutputs[] = {{"k_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
                                                    {"v_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
                                                    {"bounds", ort::ElementType::kFloat, true, kShape_B_G_2D_P},
                                                    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
                                                    {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr Schema kKvcCompact{"KvcCompact", kKvcCompactInputs, kKvcCompactOutputs};

// Keep the part of stored and new tokens that the last queries of a turn look at.
inline constexpr TensorSpec kKvcCompactTurnInputs[] = {{"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
                                                       {"k", ort::ElementType::kFloat, false, kShape_B_G_S_D},
                                                       {"v", ort::ElementType::kFloat, false, kShape_B_G_S_D},
                                                       {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B},
                                                       {"window_lengths", ort::ElementType::kInt64, false, kShape_B},
                                                       {"prompt_budgets", ort::ElementType::kInt64, true, kShape_B},
                                                       {"pool_kernels", ort::ElementType::kInt64, true, kShape_B}};
inline constexpr TensorSpec kKvcCompactTurnOutputs[] = {{"k_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
                                                        {"v_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
                                                        {"bounds", ort::ElementType::kFloat, true, kShape_B_G_2D_P},
                                                        {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
                                                        {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr Schema kKvcCompactTurn{"KvcCompactTurn", kKvcCompactTurnInputs, kKvcCompactTurnOutputs};

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

// Exact attention of a turn's tokens to everything stored, and causally to each other.
inline constexpr TensorSpec kKvcExtendAttentionInputs[] = {
    {"q", ort::ElementType::kFloat, false, kShape_B_H_M_D},
    {"k", ort::ElementType::kFloat, false, kShape_B_G_T_D},
    {"v", ort::ElementType::kFloat, false, kShape_B_G_T_D},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcExtendAttentionOutputs[] = {{"o", ort::ElementType::kFloat, false, kShape_B_H_M_D}};
inline constexpr Schema kKvcExtendAttention{"KvcExtendAttention", kKvcExtendAttentionInputs,
                                            kKvcExtendAttentionOutputs};

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

// Stored and new tokens of a turn in one table.
inline constexpr TensorSpec kKvcJoinBlockInputs[] = {{"k_new", ort::ElementType::kFloat, false, kShape_B_G_M_D},
                                                     {"v_new", ort::ElementType::kFloat, false, kShape_B_G_M_D},
                                                     {"k_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
                                                     {"v_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
                                                     {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
                                                     {"lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcJoinBlockOutputs[] = {{"k", ort::ElementType::kFloat, false, kShape_B_G_CAndM_D},
                                                      {"v", ort::ElementType::kFloat, false, kShape_B_G_CAndM_D},
                                                      {"joined_lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr Schema kKvcJoinBlock{"KvcJoinBlock", kKvcJoinBlockInputs, kKvcJoinBlockOutputs};

// Exact causal attention over the prompt, in memory linear in its length.
inline constexpr TensorSpec kKvcPrefillAttentionInputs[] = {{"q", ort::ElementType::kFloat, false, kShape_B_H_M_D},
                                                            {"k", ort::ElementType::kFloat, false, kShape_B_G_S_D},
                                                            {"v", ort::ElementType::kFloat, false, kShape_B_G_S_D}};
inline constexpr TensorSpec kKvcPrefillAttentionOutputs[] = {{"o", ort::ElementType::kFloat, false, kShape_B_H_M_D}};
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

}  // namespace schemas

}  // namespace kvc
