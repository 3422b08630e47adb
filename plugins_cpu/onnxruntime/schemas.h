// Generated from the operators' schemas (kvc_trt/operators) by `python -m plugins_cpu.generate`; edit those.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/stored.h"
#include "onnxruntime/abi.h"

namespace kvc {

/// The version of the interface that Python and the library share.
inline constexpr int32_t kInterface = 1106751314;

inline constexpr const char* kDomain = "kvc";

/// The symbols of tensor dimensions.
enum class Symbol : uint8_t {
    kSymbolT,            ///< T
    kSymbolIn,           ///< In
    kSymbolExperts,      ///< Experts
    kSymbolInner,        ///< Inner
    kOne,                ///< 1
    kBatch,              ///< B
    kHeads,              ///< H
    kWindow,             ///< W
    kHeadSize,           ///< D
    kKvHeads,            ///< G
    kPromptLength,       ///< S
    kCapacity,           ///< C
    kTwiceHeadSize,      ///< 2D
    kPages,              ///< P
    kHalfHeadSize,       ///< D/2
    kGroups,             ///< groups
    kBlock,              ///< M
    kSymbolChannels,     ///< Channels
    kSymbolValueHeads,   ///< ValueHeads
    kSymbolOne,          ///< One
    kSymbolKernel,       ///< Kernel
    kSymbolBefore,       ///< Before
    kSymbolKeySize,      ///< KeySize
    kSymbolValueSize,    ///< ValueSize
    kSelectedWidth,      ///< K
    kCapacityAndBlock,   ///< C+M
    kSymbolInBlocks,     ///< InBlocks
    kSymbolBytes,        ///< Bytes
    kSymbolInnerBlocks,  ///< InnerBlocks
    kSymbolOut,          ///< Out
    kSymbolBlocks,       ///< Blocks
};
inline constexpr size_t kSymbols = 31;

/// The symbols' names in messages.
inline constexpr const char* kSymbolNames[kSymbols] = {"T",
                                                       "In",
                                                       "Experts",
                                                       "Inner",
                                                       "one",
                                                       "batch",
                                                       "heads",
                                                       "window",
                                                       "head size",
                                                       "kv heads",
                                                       "prompt length",
                                                       "capacity",
                                                       "2 x head size",
                                                       "pages",
                                                       "half head size",
                                                       "groups",
                                                       "block",
                                                       "Channels",
                                                       "ValueHeads",
                                                       "One",
                                                       "Kernel",
                                                       "Before",
                                                       "KeySize",
                                                       "ValueSize",
                                                       "selected width",
                                                       "capacity + block",
                                                       "InBlocks",
                                                       "Bytes",
                                                       "InnerBlocks",
                                                       "Out",
                                                       "Blocks"};

inline constexpr size_t kMaxTensors = 14;
inline constexpr size_t kMaxRank = 4;

struct TensorSpec {
    const char* name;
    ort::ElementType type;
    bool optional;
    std::span<const Symbol> shape;
};

/// The inputs and outputs of an operator, in the order of a node, for caches of one format and bounds of one type.
struct Schema {
    const char* name;
    std::span<const TensorSpec> inputs;
    std::span<const TensorSpec> outputs;
    VectorFormat keys = VectorFormat::kExact;
    VectorFormat values = VectorFormat::kExact;
    bool fp8_bounds = false;
};

namespace schemas {

inline constexpr Symbol kShape_T_In[] = {Symbol::kSymbolT, Symbol::kSymbolIn};
inline constexpr Symbol kShape_Experts_In[] = {Symbol::kSymbolExperts, Symbol::kSymbolIn};
inline constexpr Symbol kShape_Experts_Inner_In[] = {Symbol::kSymbolExperts, Symbol::kSymbolInner, Symbol::kSymbolIn};
inline constexpr Symbol kShape_Experts_In_Inner[] = {Symbol::kSymbolExperts, Symbol::kSymbolIn, Symbol::kSymbolInner};
inline constexpr Symbol kShape_Experts[] = {Symbol::kSymbolExperts};
inline constexpr Symbol kShape_Experts_Inner[] = {Symbol::kSymbolExperts, Symbol::kSymbolInner};
inline constexpr Symbol kShape_1[] = {Symbol::kOne};
inline constexpr Symbol kShape_B_H_W_D[] = {Symbol::kBatch, Symbol::kHeads, Symbol::kWindow, Symbol::kHeadSize};
inline constexpr Symbol kShape_B_G_S_D[] = {Symbol::kBatch, Symbol::kKvHeads, Symbol::kPromptLength, Symbol::kHeadSize};
inline constexpr Symbol kShape_B[] = {Symbol::kBatch};
inline constexpr Symbol kShape_B_G_C_D[] = {Symbol::kBatch, Symbol::kKvHeads, Symbol::kCapacity, Symbol::kHeadSize};
inline constexpr Symbol kShape_B_G_2D_P[] = {Symbol::kBatch, Symbol::kKvHeads, Symbol::kTwiceHeadSize, Symbol::kPages};
inline constexpr Symbol kShape_B_G_C[] = {Symbol::kBatch, Symbol::kKvHeads, Symbol::kCapacity};
inline constexpr Symbol kShape_B_G_C_1[] = {Symbol::kBatch, Symbol::kKvHeads, Symbol::kCapacity, Symbol::kOne};
inline constexpr Symbol kShape_B_G_C_DOver2[] = {Symbol::kBatch, Symbol::kKvHeads, Symbol::kCapacity,
                                                 Symbol::kHalfHeadSize};
inline constexpr Symbol kShape_B_G_C_groups[] = {Symbol::kBatch, Symbol::kKvHeads, Symbol::kCapacity, Symbol::kGroups};
inline constexpr Symbol kShape_B_G_S_1[] = {Symbol::kBatch, Symbol::kKvHeads, Symbol::kPromptLength, Symbol::kOne};
inline constexpr Symbol kShape_B_G_S_DOver2[] = {Symbol::kBatch, Symbol::kKvHeads, Symbol::kPromptLength,
                                                 Symbol::kHalfHeadSize};
inline constexpr Symbol kShape_B_G_S_groups[] = {Symbol::kBatch, Symbol::kKvHeads, Symbol::kPromptLength,
                                                 Symbol::kGroups};
inline constexpr Symbol kShape_B_M_Channels[] = {Symbol::kBatch, Symbol::kBlock, Symbol::kSymbolChannels};
inline constexpr Symbol kShape_B_M_ValueHeads[] = {Symbol::kBatch, Symbol::kBlock, Symbol::kSymbolValueHeads};
inline constexpr Symbol kShape_Channels_One_Kernel[] = {Symbol::kSymbolChannels, Symbol::kSymbolOne,
                                                        Symbol::kSymbolKernel};
inline constexpr Symbol kShape_ValueHeads[] = {Symbol::kSymbolValueHeads};
inline constexpr Symbol kShape_B_Before_Channels[] = {Symbol::kBatch, Symbol::kSymbolBefore, Symbol::kSymbolChannels};
inline constexpr Symbol kShape_B_ValueHeads_KeySize_ValueSize[] = {Symbol::kBatch, Symbol::kSymbolValueHeads,
                                                                   Symbol::kSymbolKeySize, Symbol::kSymbolValueSize};
inline constexpr Symbol kShape_B_M_ValueHeads_ValueSize[] = {Symbol::kBatch, Symbol::kBlock, Symbol::kSymbolValueHeads,
                                                             Symbol::kSymbolValueSize};
inline constexpr Symbol kShape_B_Channels[] = {Symbol::kBatch, Symbol::kSymbolChannels};
inline constexpr Symbol kShape_B_ValueHeads[] = {Symbol::kBatch, Symbol::kSymbolValueHeads};
inline constexpr Symbol kShape_B_ValueHeads_ValueSize[] = {Symbol::kBatch, Symbol::kSymbolValueHeads,
                                                           Symbol::kSymbolValueSize};
inline constexpr Symbol kShape_B_H_D[] = {Symbol::kBatch, Symbol::kHeads, Symbol::kHeadSize};
inline constexpr Symbol kShape_B_G_D[] = {Symbol::kBatch, Symbol::kKvHeads, Symbol::kHeadSize};
inline constexpr Symbol kShape_B_H_M_D[] = {Symbol::kBatch, Symbol::kHeads, Symbol::kBlock, Symbol::kHeadSize};
inline constexpr Symbol kShape_B_G_T_D[] = {Symbol::kBatch, Symbol::kKvHeads, Symbol::kSymbolT, Symbol::kHeadSize};
inline constexpr Symbol kShape_B_G_T_1[] = {Symbol::kBatch, Symbol::kKvHeads, Symbol::kSymbolT, Symbol::kOne};
inline constexpr Symbol kShape_B_G_T_DOver2[] = {Symbol::kBatch, Symbol::kKvHeads, Symbol::kSymbolT,
                                                 Symbol::kHalfHeadSize};
inline constexpr Symbol kShape_B_G_T_groups[] = {Symbol::kBatch, Symbol::kKvHeads, Symbol::kSymbolT, Symbol::kGroups};
inline constexpr Symbol kShape_B_G_K[] = {Symbol::kBatch, Symbol::kKvHeads, Symbol::kSelectedWidth};
inline constexpr Symbol kShape_B_G_M_D[] = {Symbol::kBatch, Symbol::kKvHeads, Symbol::kBlock, Symbol::kHeadSize};
inline constexpr Symbol kShape_B_G_CAndM_D[] = {Symbol::kBatch, Symbol::kKvHeads, Symbol::kCapacityAndBlock,
                                                Symbol::kHeadSize};
inline constexpr Symbol kShape_B_G_CAndM_1[] = {Symbol::kBatch, Symbol::kKvHeads, Symbol::kCapacityAndBlock,
                                                Symbol::kOne};
inline constexpr Symbol kShape_B_G_CAndM_DOver2[] = {Symbol::kBatch, Symbol::kKvHeads, Symbol::kCapacityAndBlock,
                                                     Symbol::kHalfHeadSize};
inline constexpr Symbol kShape_B_G_CAndM_groups[] = {Symbol::kBatch, Symbol::kKvHeads, Symbol::kCapacityAndBlock,
                                                     Symbol::kGroups};
inline constexpr Symbol kShape_Experts_Inner_InBlocks_Bytes[] = {Symbol::kSymbolExperts, Symbol::kSymbolInner,
                                                                 Symbol::kSymbolInBlocks, Symbol::kSymbolBytes};
inline constexpr Symbol kShape_Experts_Inner_InBlocks[] = {Symbol::kSymbolExperts, Symbol::kSymbolInner,
                                                           Symbol::kSymbolInBlocks};
inline constexpr Symbol kShape_Experts_In_InnerBlocks_Bytes[] = {Symbol::kSymbolExperts, Symbol::kSymbolIn,
                                                                 Symbol::kSymbolInnerBlocks, Symbol::kSymbolBytes};
inline constexpr Symbol kShape_Experts_In_InnerBlocks[] = {Symbol::kSymbolExperts, Symbol::kSymbolIn,
                                                           Symbol::kSymbolInnerBlocks};
inline constexpr Symbol kShape_Out_Blocks_Bytes[] = {Symbol::kSymbolOut, Symbol::kSymbolBlocks, Symbol::kSymbolBytes};
inline constexpr Symbol kShape_Out_Blocks[] = {Symbol::kSymbolOut, Symbol::kSymbolBlocks};
inline constexpr Symbol kShape_T_Out[] = {Symbol::kSymbolT, Symbol::kSymbolOut};

// KvcExperts with biases and a clamped gate.
inline constexpr TensorSpec kKvcClampedExpertsInputs[] = {
    {"x", ort::ElementType::kFloat, false, kShape_T_In},
    {"router", ort::ElementType::kFloat, false, kShape_Experts_In},
    {"gate", ort::ElementType::kFloat, false, kShape_Experts_Inner_In},
    {"up", ort::ElementType::kFloat, false, kShape_Experts_Inner_In},
    {"down", ort::ElementType::kFloat, false, kShape_Experts_In_Inner},
    {"router_bias", ort::ElementType::kFloat, false, kShape_Experts},
    {"gate_bias", ort::ElementType::kFloat, false, kShape_Experts_Inner},
    {"up_bias", ort::ElementType::kFloat, false, kShape_Experts_Inner},
    {"down_bias", ort::ElementType::kFloat, false, kShape_Experts_In},
    {"gate_limit", ort::ElementType::kFloat, false, kShape_1},
    {"gate_gain", ort::ElementType::kFloat, false, kShape_1}};
inline constexpr TensorSpec kKvcClampedExpertsOutputs[] = {{"y", ort::ElementType::kFloat, false, kShape_T_In}};
inline constexpr Schema kKvcClampedExperts[] = {{"KvcClampedExperts", kKvcClampedExpertsInputs,
                                                 kKvcClampedExpertsOutputs, VectorFormat::kExact, VectorFormat::kExact,
                                                 false}};

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
inline constexpr TensorSpec kKvcCompact_fp8_boundsInputs[] = {
    {"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
    {"k", ort::ElementType::kFloat, false, kShape_B_G_S_D},
    {"v", ort::ElementType::kFloat, false, kShape_B_G_S_D},
    {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"prompt_budgets", ort::ElementType::kInt64, true, kShape_B},
    {"pool_kernels", ort::ElementType::kInt64, true, kShape_B}};
inline constexpr TensorSpec kKvcCompact_fp8_boundsOutputs[] = {
    {"k_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"v_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"bounds", ort::ElementType::kInt8, true, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr TensorSpec kKvcCompact_int8Inputs[] = {{"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
                                                        {"k", ort::ElementType::kFloat, false, kShape_B_G_S_D},
                                                        {"v", ort::ElementType::kFloat, false, kShape_B_G_S_D},
                                                        {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B},
                                                        {"prompt_budgets", ort::ElementType::kInt64, true, kShape_B},
                                                        {"pool_kernels", ort::ElementType::kInt64, true, kShape_B}};
inline constexpr TensorSpec kKvcCompact_int8Outputs[] = {{"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
                                                         {"k_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
                                                         {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
                                                         {"v_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
                                                         {"bounds", ort::ElementType::kFloat, true, kShape_B_G_2D_P},
                                                         {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
                                                         {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr TensorSpec kKvcCompact_int8_fp8_boundsInputs[] = {
    {"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
    {"k", ort::ElementType::kFloat, false, kShape_B_G_S_D},
    {"v", ort::ElementType::kFloat, false, kShape_B_G_S_D},
    {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"prompt_budgets", ort::ElementType::kInt64, true, kShape_B},
    {"pool_kernels", ort::ElementType::kInt64, true, kShape_B}};
inline constexpr TensorSpec kKvcCompact_int8_fp8_boundsOutputs[] = {
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"v_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"bounds", ort::ElementType::kInt8, true, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr TensorSpec kKvcCompact_fp8Inputs[] = {{"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
                                                       {"k", ort::ElementType::kFloat, false, kShape_B_G_S_D},
                                                       {"v", ort::ElementType::kFloat, false, kShape_B_G_S_D},
                                                       {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B},
                                                       {"prompt_budgets", ort::ElementType::kInt64, true, kShape_B},
                                                       {"pool_kernels", ort::ElementType::kInt64, true, kShape_B}};
inline constexpr TensorSpec kKvcCompact_fp8Outputs[] = {{"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
                                                        {"k_scale", ort::ElementType::kInt8, false, kShape_B_G_C_1},
                                                        {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
                                                        {"v_scale", ort::ElementType::kInt8, false, kShape_B_G_C_1},
                                                        {"bounds", ort::ElementType::kFloat, true, kShape_B_G_2D_P},
                                                        {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
                                                        {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr TensorSpec kKvcCompact_fp8_fp8_boundsInputs[] = {
    {"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
    {"k", ort::ElementType::kFloat, false, kShape_B_G_S_D},
    {"v", ort::ElementType::kFloat, false, kShape_B_G_S_D},
    {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"prompt_budgets", ort::ElementType::kInt64, true, kShape_B},
    {"pool_kernels", ort::ElementType::kInt64, true, kShape_B}};
inline constexpr TensorSpec kKvcCompact_fp8_fp8_boundsOutputs[] = {
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale", ort::ElementType::kInt8, false, kShape_B_G_C_1},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"v_scale", ort::ElementType::kInt8, false, kShape_B_G_C_1},
    {"bounds", ort::ElementType::kInt8, true, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr TensorSpec kKvcCompact_int4Inputs[] = {{"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
                                                        {"k", ort::ElementType::kFloat, false, kShape_B_G_S_D},
                                                        {"v", ort::ElementType::kFloat, false, kShape_B_G_S_D},
                                                        {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B},
                                                        {"prompt_budgets", ort::ElementType::kInt64, true, kShape_B},
                                                        {"pool_kernels", ort::ElementType::kInt64, true, kShape_B}};
inline constexpr TensorSpec kKvcCompact_int4Outputs[] = {
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"k_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"k_minimum", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"v_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_minimum", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"bounds", ort::ElementType::kFloat, true, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr TensorSpec kKvcCompact_int4_fp8_boundsInputs[] = {
    {"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
    {"k", ort::ElementType::kFloat, false, kShape_B_G_S_D},
    {"v", ort::ElementType::kFloat, false, kShape_B_G_S_D},
    {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"prompt_budgets", ort::ElementType::kInt64, true, kShape_B},
    {"pool_kernels", ort::ElementType::kInt64, true, kShape_B}};
inline constexpr TensorSpec kKvcCompact_int4_fp8_boundsOutputs[] = {
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"k_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"k_minimum", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"v_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_minimum", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"bounds", ort::ElementType::kInt8, true, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr TensorSpec kKvcCompact_k8v4Inputs[] = {{"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
                                                        {"k", ort::ElementType::kFloat, false, kShape_B_G_S_D},
                                                        {"v", ort::ElementType::kFloat, false, kShape_B_G_S_D},
                                                        {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B},
                                                        {"prompt_budgets", ort::ElementType::kInt64, true, kShape_B},
                                                        {"pool_kernels", ort::ElementType::kInt64, true, kShape_B}};
inline constexpr TensorSpec kKvcCompact_k8v4Outputs[] = {
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"v_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_minimum", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"bounds", ort::ElementType::kFloat, true, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr TensorSpec kKvcCompact_k8v4_fp8_boundsInputs[] = {
    {"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
    {"k", ort::ElementType::kFloat, false, kShape_B_G_S_D},
    {"v", ort::ElementType::kFloat, false, kShape_B_G_S_D},
    {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"prompt_budgets", ort::ElementType::kInt64, true, kShape_B},
    {"pool_kernels", ort::ElementType::kInt64, true, kShape_B}};
inline constexpr TensorSpec kKvcCompact_k8v4_fp8_boundsOutputs[] = {
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"v_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_minimum", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"bounds", ort::ElementType::kInt8, true, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr Schema kKvcCompact[] = {
    {"KvcCompact", kKvcCompactInputs, kKvcCompactOutputs, VectorFormat::kExact, VectorFormat::kExact, false},
    {"KvcCompact_fp8_bounds", kKvcCompact_fp8_boundsInputs, kKvcCompact_fp8_boundsOutputs, VectorFormat::kExact,
     VectorFormat::kExact, true},
    {"KvcCompact_int8", kKvcCompact_int8Inputs, kKvcCompact_int8Outputs, VectorFormat::kInt8, VectorFormat::kInt8,
     false},
    {"KvcCompact_int8_fp8_bounds", kKvcCompact_int8_fp8_boundsInputs, kKvcCompact_int8_fp8_boundsOutputs,
     VectorFormat::kInt8, VectorFormat::kInt8, true},
    {"KvcCompact_fp8", kKvcCompact_fp8Inputs, kKvcCompact_fp8Outputs, VectorFormat::kFp8, VectorFormat::kFp8, false},
    {"KvcCompact_fp8_fp8_bounds", kKvcCompact_fp8_fp8_boundsInputs, kKvcCompact_fp8_fp8_boundsOutputs,
     VectorFormat::kFp8, VectorFormat::kFp8, true},
    {"KvcCompact_int4", kKvcCompact_int4Inputs, kKvcCompact_int4Outputs, VectorFormat::kInt4, VectorFormat::kInt4,
     false},
    {"KvcCompact_int4_fp8_bounds", kKvcCompact_int4_fp8_boundsInputs, kKvcCompact_int4_fp8_boundsOutputs,
     VectorFormat::kInt4, VectorFormat::kInt4, true},
    {"KvcCompact_k8v4", kKvcCompact_k8v4Inputs, kKvcCompact_k8v4Outputs, VectorFormat::kInt8, VectorFormat::kInt4,
     false},
    {"KvcCompact_k8v4_fp8_bounds", kKvcCompact_k8v4_fp8_boundsInputs, kKvcCompact_k8v4_fp8_boundsOutputs,
     VectorFormat::kInt8, VectorFormat::kInt4, true}};

// KvcCompact with average-pooling: pool_kernel and pool_kernels are its widths.
inline constexpr TensorSpec kKvcCompactAverageInputs[] = {{"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
                                                          {"k", ort::ElementType::kFloat, false, kShape_B_G_S_D},
                                                          {"v", ort::ElementType::kFloat, false, kShape_B_G_S_D},
                                                          {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B},
                                                          {"prompt_budgets", ort::ElementType::kInt64, true, kShape_B},
                                                          {"pool_kernels", ort::ElementType::kInt64, true, kShape_B}};
inline constexpr TensorSpec kKvcCompactAverageOutputs[] = {{"k_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
                                                           {"v_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
                                                           {"bounds", ort::ElementType::kFloat, true, kShape_B_G_2D_P},
                                                           {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
                                                           {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr TensorSpec kKvcCompactAverage_fp8_boundsInputs[] = {
    {"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
    {"k", ort::ElementType::kFloat, false, kShape_B_G_S_D},
    {"v", ort::ElementType::kFloat, false, kShape_B_G_S_D},
    {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"prompt_budgets", ort::ElementType::kInt64, true, kShape_B},
    {"pool_kernels", ort::ElementType::kInt64, true, kShape_B}};
inline constexpr TensorSpec kKvcCompactAverage_fp8_boundsOutputs[] = {
    {"k_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"v_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"bounds", ort::ElementType::kInt8, true, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr TensorSpec kKvcCompactAverage_int8Inputs[] = {
    {"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
    {"k", ort::ElementType::kFloat, false, kShape_B_G_S_D},
    {"v", ort::ElementType::kFloat, false, kShape_B_G_S_D},
    {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"prompt_budgets", ort::ElementType::kInt64, true, kShape_B},
    {"pool_kernels", ort::ElementType::kInt64, true, kShape_B}};
inline constexpr TensorSpec kKvcCompactAverage_int8Outputs[] = {
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"v_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"bounds", ort::ElementType::kFloat, true, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr TensorSpec kKvcCompactAverage_int8_fp8_boundsInputs[] = {
    {"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
    {"k", ort::ElementType::kFloat, false, kShape_B_G_S_D},
    {"v", ort::ElementType::kFloat, false, kShape_B_G_S_D},
    {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"prompt_budgets", ort::ElementType::kInt64, true, kShape_B},
    {"pool_kernels", ort::ElementType::kInt64, true, kShape_B}};
inline constexpr TensorSpec kKvcCompactAverage_int8_fp8_boundsOutputs[] = {
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"v_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"bounds", ort::ElementType::kInt8, true, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr TensorSpec kKvcCompactAverage_fp8Inputs[] = {
    {"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
    {"k", ort::ElementType::kFloat, false, kShape_B_G_S_D},
    {"v", ort::ElementType::kFloat, false, kShape_B_G_S_D},
    {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"prompt_budgets", ort::ElementType::kInt64, true, kShape_B},
    {"pool_kernels", ort::ElementType::kInt64, true, kShape_B}};
inline constexpr TensorSpec kKvcCompactAverage_fp8Outputs[] = {
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale", ort::ElementType::kInt8, false, kShape_B_G_C_1},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"v_scale", ort::ElementType::kInt8, false, kShape_B_G_C_1},
    {"bounds", ort::ElementType::kFloat, true, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr TensorSpec kKvcCompactAverage_fp8_fp8_boundsInputs[] = {
    {"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
    {"k", ort::ElementType::kFloat, false, kShape_B_G_S_D},
    {"v", ort::ElementType::kFloat, false, kShape_B_G_S_D},
    {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"prompt_budgets", ort::ElementType::kInt64, true, kShape_B},
    {"pool_kernels", ort::ElementType::kInt64, true, kShape_B}};
inline constexpr TensorSpec kKvcCompactAverage_fp8_fp8_boundsOutputs[] = {
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale", ort::ElementType::kInt8, false, kShape_B_G_C_1},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"v_scale", ort::ElementType::kInt8, false, kShape_B_G_C_1},
    {"bounds", ort::ElementType::kInt8, true, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr TensorSpec kKvcCompactAverage_int4Inputs[] = {
    {"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
    {"k", ort::ElementType::kFloat, false, kShape_B_G_S_D},
    {"v", ort::ElementType::kFloat, false, kShape_B_G_S_D},
    {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"prompt_budgets", ort::ElementType::kInt64, true, kShape_B},
    {"pool_kernels", ort::ElementType::kInt64, true, kShape_B}};
inline constexpr TensorSpec kKvcCompactAverage_int4Outputs[] = {
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"k_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"k_minimum", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"v_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_minimum", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"bounds", ort::ElementType::kFloat, true, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr TensorSpec kKvcCompactAverage_int4_fp8_boundsInputs[] = {
    {"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
    {"k", ort::ElementType::kFloat, false, kShape_B_G_S_D},
    {"v", ort::ElementType::kFloat, false, kShape_B_G_S_D},
    {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"prompt_budgets", ort::ElementType::kInt64, true, kShape_B},
    {"pool_kernels", ort::ElementType::kInt64, true, kShape_B}};
inline constexpr TensorSpec kKvcCompactAverage_int4_fp8_boundsOutputs[] = {
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"k_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"k_minimum", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"v_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_minimum", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"bounds", ort::ElementType::kInt8, true, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr TensorSpec kKvcCompactAverage_k8v4Inputs[] = {
    {"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
    {"k", ort::ElementType::kFloat, false, kShape_B_G_S_D},
    {"v", ort::ElementType::kFloat, false, kShape_B_G_S_D},
    {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"prompt_budgets", ort::ElementType::kInt64, true, kShape_B},
    {"pool_kernels", ort::ElementType::kInt64, true, kShape_B}};
inline constexpr TensorSpec kKvcCompactAverage_k8v4Outputs[] = {
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"v_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_minimum", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"bounds", ort::ElementType::kFloat, true, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr TensorSpec kKvcCompactAverage_k8v4_fp8_boundsInputs[] = {
    {"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
    {"k", ort::ElementType::kFloat, false, kShape_B_G_S_D},
    {"v", ort::ElementType::kFloat, false, kShape_B_G_S_D},
    {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"prompt_budgets", ort::ElementType::kInt64, true, kShape_B},
    {"pool_kernels", ort::ElementType::kInt64, true, kShape_B}};
inline constexpr TensorSpec kKvcCompactAverage_k8v4_fp8_boundsOutputs[] = {
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"v_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_minimum", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"bounds", ort::ElementType::kInt8, true, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr Schema kKvcCompactAverage[] = {
    {"KvcCompactAverage", kKvcCompactAverageInputs, kKvcCompactAverageOutputs, VectorFormat::kExact,
     VectorFormat::kExact, false},
    {"KvcCompactAverage_fp8_bounds", kKvcCompactAverage_fp8_boundsInputs, kKvcCompactAverage_fp8_boundsOutputs,
     VectorFormat::kExact, VectorFormat::kExact, true},
    {"KvcCompactAverage_int8", kKvcCompactAverage_int8Inputs, kKvcCompactAverage_int8Outputs, VectorFormat::kInt8,
     VectorFormat::kInt8, false},
    {"KvcCompactAverage_int8_fp8_bounds", kKvcCompactAverage_int8_fp8_boundsInputs,
     kKvcCompactAverage_int8_fp8_boundsOutputs, VectorFormat::kInt8, VectorFormat::kInt8, true},
    {"KvcCompactAverage_fp8", kKvcCompactAverage_fp8Inputs, kKvcCompactAverage_fp8Outputs, VectorFormat::kFp8,
     VectorFormat::kFp8, false},
    {"KvcCompactAverage_fp8_fp8_bounds", kKvcCompactAverage_fp8_fp8_boundsInputs,
     kKvcCompactAverage_fp8_fp8_boundsOutputs, VectorFormat::kFp8, VectorFormat::kFp8, true},
    {"KvcCompactAverage_int4", kKvcCompactAverage_int4Inputs, kKvcCompactAverage_int4Outputs, VectorFormat::kInt4,
     VectorFormat::kInt4, false},
    {"KvcCompactAverage_int4_fp8_bounds", kKvcCompactAverage_int4_fp8_boundsInputs,
     kKvcCompactAverage_int4_fp8_boundsOutputs, VectorFormat::kInt4, VectorFormat::kInt4, true},
    {"KvcCompactAverage_k8v4", kKvcCompactAverage_k8v4Inputs, kKvcCompactAverage_k8v4Outputs, VectorFormat::kInt8,
     VectorFormat::kInt4, false},
    {"KvcCompactAverage_k8v4_fp8_bounds", kKvcCompactAverage_k8v4_fp8_boundsInputs,
     kKvcCompactAverage_k8v4_fp8_boundsOutputs, VectorFormat::kInt8, VectorFormat::kInt4, true}};

// KvcCompactTurn with average-pooling.
inline constexpr TensorSpec kKvcCompactAverageTurnInputs[] = {
    {"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
    {"k", ort::ElementType::kFloat, false, kShape_B_G_S_D},
    {"v", ort::ElementType::kFloat, false, kShape_B_G_S_D},
    {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"window_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"prompt_budgets", ort::ElementType::kInt64, true, kShape_B},
    {"pool_kernels", ort::ElementType::kInt64, true, kShape_B}};
inline constexpr TensorSpec kKvcCompactAverageTurnOutputs[] = {
    {"k_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"v_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"bounds", ort::ElementType::kFloat, true, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr TensorSpec kKvcCompactAverageTurn_fp8_boundsInputs[] = {
    {"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
    {"k", ort::ElementType::kFloat, false, kShape_B_G_S_D},
    {"v", ort::ElementType::kFloat, false, kShape_B_G_S_D},
    {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"window_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"prompt_budgets", ort::ElementType::kInt64, true, kShape_B},
    {"pool_kernels", ort::ElementType::kInt64, true, kShape_B}};
inline constexpr TensorSpec kKvcCompactAverageTurn_fp8_boundsOutputs[] = {
    {"k_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"v_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"bounds", ort::ElementType::kInt8, true, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr TensorSpec kKvcCompactAverageTurn_int8Inputs[] = {
    {"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
    {"k", ort::ElementType::kInt8, false, kShape_B_G_S_D},
    {"joined_k_scale", ort::ElementType::kFloat16, false, kShape_B_G_S_1},
    {"v", ort::ElementType::kInt8, false, kShape_B_G_S_D},
    {"joined_v_scale", ort::ElementType::kFloat16, false, kShape_B_G_S_1},
    {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"window_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"prompt_budgets", ort::ElementType::kInt64, true, kShape_B},
    {"pool_kernels", ort::ElementType::kInt64, true, kShape_B}};
inline constexpr TensorSpec kKvcCompactAverageTurn_int8Outputs[] = {
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"v_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"bounds", ort::ElementType::kFloat, true, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr TensorSpec kKvcCompactAverageTurn_int8_fp8_boundsInputs[] = {
    {"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
    {"k", ort::ElementType::kInt8, false, kShape_B_G_S_D},
    {"joined_k_scale", ort::ElementType::kFloat16, false, kShape_B_G_S_1},
    {"v", ort::ElementType::kInt8, false, kShape_B_G_S_D},
    {"joined_v_scale", ort::ElementType::kFloat16, false, kShape_B_G_S_1},
    {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"window_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"prompt_budgets", ort::ElementType::kInt64, true, kShape_B},
    {"pool_kernels", ort::ElementType::kInt64, true, kShape_B}};
inline constexpr TensorSpec kKvcCompactAverageTurn_int8_fp8_boundsOutputs[] = {
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"v_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"bounds", ort::ElementType::kInt8, true, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr TensorSpec kKvcCompactAverageTurn_fp8Inputs[] = {
    {"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
    {"k", ort::ElementType::kInt8, false, kShape_B_G_S_D},
    {"joined_k_scale", ort::ElementType::kInt8, false, kShape_B_G_S_1},
    {"v", ort::ElementType::kInt8, false, kShape_B_G_S_D},
    {"joined_v_scale", ort::ElementType::kInt8, false, kShape_B_G_S_1},
    {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"window_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"prompt_budgets", ort::ElementType::kInt64, true, kShape_B},
    {"pool_kernels", ort::ElementType::kInt64, true, kShape_B}};
inline constexpr TensorSpec kKvcCompactAverageTurn_fp8Outputs[] = {
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale", ort::ElementType::kInt8, false, kShape_B_G_C_1},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"v_scale", ort::ElementType::kInt8, false, kShape_B_G_C_1},
    {"bounds", ort::ElementType::kFloat, true, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr TensorSpec kKvcCompactAverageTurn_fp8_fp8_boundsInputs[] = {
    {"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
    {"k", ort::ElementType::kInt8, false, kShape_B_G_S_D},
    {"joined_k_scale", ort::ElementType::kInt8, false, kShape_B_G_S_1},
    {"v", ort::ElementType::kInt8, false, kShape_B_G_S_D},
    {"joined_v_scale", ort::ElementType::kInt8, false, kShape_B_G_S_1},
    {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"window_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"prompt_budgets", ort::ElementType::kInt64, true, kShape_B},
    {"pool_kernels", ort::ElementType::kInt64, true, kShape_B}};
inline constexpr TensorSpec kKvcCompactAverageTurn_fp8_fp8_boundsOutputs[] = {
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale", ort::ElementType::kInt8, false, kShape_B_G_C_1},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"v_scale", ort::ElementType::kInt8, false, kShape_B_G_C_1},
    {"bounds", ort::ElementType::kInt8, true, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr TensorSpec kKvcCompactAverageTurn_int4Inputs[] = {
    {"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
    {"k", ort::ElementType::kInt8, false, kShape_B_G_S_DOver2},
    {"joined_k_scale", ort::ElementType::kFloat16, false, kShape_B_G_S_groups},
    {"joined_k_minimum", ort::ElementType::kFloat16, false, kShape_B_G_S_groups},
    {"v", ort::ElementType::kInt8, false, kShape_B_G_S_DOver2},
    {"joined_v_scale", ort::ElementType::kFloat16, false, kShape_B_G_S_groups},
    {"joined_v_minimum", ort::ElementType::kFloat16, false, kShape_B_G_S_groups},
    {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"window_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"prompt_budgets", ort::ElementType::kInt64, true, kShape_B},
    {"pool_kernels", ort::ElementType::kInt64, true, kShape_B}};
inline constexpr TensorSpec kKvcCompactAverageTurn_int4Outputs[] = {
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"k_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"k_minimum", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"v_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_minimum", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"bounds", ort::ElementType::kFloat, true, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr TensorSpec kKvcCompactAverageTurn_int4_fp8_boundsInputs[] = {
    {"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
    {"k", ort::ElementType::kInt8, false, kShape_B_G_S_DOver2},
    {"joined_k_scale", ort::ElementType::kFloat16, false, kShape_B_G_S_groups},
    {"joined_k_minimum", ort::ElementType::kFloat16, false, kShape_B_G_S_groups},
    {"v", ort::ElementType::kInt8, false, kShape_B_G_S_DOver2},
    {"joined_v_scale", ort::ElementType::kFloat16, false, kShape_B_G_S_groups},
    {"joined_v_minimum", ort::ElementType::kFloat16, false, kShape_B_G_S_groups},
    {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"window_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"prompt_budgets", ort::ElementType::kInt64, true, kShape_B},
    {"pool_kernels", ort::ElementType::kInt64, true, kShape_B}};
inline constexpr TensorSpec kKvcCompactAverageTurn_int4_fp8_boundsOutputs[] = {
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"k_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"k_minimum", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"v_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_minimum", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"bounds", ort::ElementType::kInt8, true, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr TensorSpec kKvcCompactAverageTurn_k8v4Inputs[] = {
    {"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
    {"k", ort::ElementType::kInt8, false, kShape_B_G_S_D},
    {"joined_k_scale", ort::ElementType::kFloat16, false, kShape_B_G_S_1},
    {"v", ort::ElementType::kInt8, false, kShape_B_G_S_DOver2},
    {"joined_v_scale", ort::ElementType::kFloat16, false, kShape_B_G_S_groups},
    {"joined_v_minimum", ort::ElementType::kFloat16, false, kShape_B_G_S_groups},
    {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"window_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"prompt_budgets", ort::ElementType::kInt64, true, kShape_B},
    {"pool_kernels", ort::ElementType::kInt64, true, kShape_B}};
inline constexpr TensorSpec kKvcCompactAverageTurn_k8v4Outputs[] = {
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"v_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_minimum", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"bounds", ort::ElementType::kFloat, true, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr TensorSpec kKvcCompactAverageTurn_k8v4_fp8_boundsInputs[] = {
    {"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
    {"k", ort::ElementType::kInt8, false, kShape_B_G_S_D},
    {"joined_k_scale", ort::ElementType::kFloat16, false, kShape_B_G_S_1},
    {"v", ort::ElementType::kInt8, false, kShape_B_G_S_DOver2},
    {"joined_v_scale", ort::ElementType::kFloat16, false, kShape_B_G_S_groups},
    {"joined_v_minimum", ort::ElementType::kFloat16, false, kShape_B_G_S_groups},
    {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"window_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"prompt_budgets", ort::ElementType::kInt64, true, kShape_B},
    {"pool_kernels", ort::ElementType::kInt64, true, kShape_B}};
inline constexpr TensorSpec kKvcCompactAverageTurn_k8v4_fp8_boundsOutputs[] = {
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"v_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_minimum", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"bounds", ort::ElementType::kInt8, true, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr Schema kKvcCompactAverageTurn[] = {
    {"KvcCompactAverageTurn", kKvcCompactAverageTurnInputs, kKvcCompactAverageTurnOutputs, VectorFormat::kExact,
     VectorFormat::kExact, false},
    {"KvcCompactAverageTurn_fp8_bounds", kKvcCompactAverageTurn_fp8_boundsInputs,
     kKvcCompactAverageTurn_fp8_boundsOutputs, VectorFormat::kExact, VectorFormat::kExact, true},
    {"KvcCompactAverageTurn_int8", kKvcCompactAverageTurn_int8Inputs, kKvcCompactAverageTurn_int8Outputs,
     VectorFormat::kInt8, VectorFormat::kInt8, false},
    {"KvcCompactAverageTurn_int8_fp8_bounds", kKvcCompactAverageTurn_int8_fp8_boundsInputs,
     kKvcCompactAverageTurn_int8_fp8_boundsOutputs, VectorFormat::kInt8, VectorFormat::kInt8, true},
    {"KvcCompactAverageTurn_fp8", kKvcCompactAverageTurn_fp8Inputs, kKvcCompactAverageTurn_fp8Outputs,
     VectorFormat::kFp8, VectorFormat::kFp8, false},
    {"KvcCompactAverageTurn_fp8_fp8_bounds", kKvcCompactAverageTurn_fp8_fp8_boundsInputs,
     kKvcCompactAverageTurn_fp8_fp8_boundsOutputs, VectorFormat::kFp8, VectorFormat::kFp8, true},
    {"KvcCompactAverageTurn_int4", kKvcCompactAverageTurn_int4Inputs, kKvcCompactAverageTurn_int4Outputs,
     VectorFormat::kInt4, VectorFormat::kInt4, false},
    {"KvcCompactAverageTurn_int4_fp8_bounds", kKvcCompactAverageTurn_int4_fp8_boundsInputs,
     kKvcCompactAverageTurn_int4_fp8_boundsOutputs, VectorFormat::kInt4, VectorFormat::kInt4, true},
    {"KvcCompactAverageTurn_k8v4", kKvcCompactAverageTurn_k8v4Inputs, kKvcCompactAverageTurn_k8v4Outputs,
     VectorFormat::kInt8, VectorFormat::kInt4, false},
    {"KvcCompactAverageTurn_k8v4_fp8_bounds", kKvcCompactAverageTurn_k8v4_fp8_boundsInputs,
     kKvcCompactAverageTurn_k8v4_fp8_boundsOutputs, VectorFormat::kInt8, VectorFormat::kInt4, true}};

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
inline constexpr TensorSpec kKvcCompactTurn_fp8_boundsInputs[] = {
    {"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
    {"k", ort::ElementType::kFloat, false, kShape_B_G_S_D},
    {"v", ort::ElementType::kFloat, false, kShape_B_G_S_D},
    {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"window_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"prompt_budgets", ort::ElementType::kInt64, true, kShape_B},
    {"pool_kernels", ort::ElementType::kInt64, true, kShape_B}};
inline constexpr TensorSpec kKvcCompactTurn_fp8_boundsOutputs[] = {
    {"k_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"v_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"bounds", ort::ElementType::kInt8, true, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr TensorSpec kKvcCompactTurn_int8Inputs[] = {
    {"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
    {"k", ort::ElementType::kInt8, false, kShape_B_G_S_D},
    {"joined_k_scale", ort::ElementType::kFloat16, false, kShape_B_G_S_1},
    {"v", ort::ElementType::kInt8, false, kShape_B_G_S_D},
    {"joined_v_scale", ort::ElementType::kFloat16, false, kShape_B_G_S_1},
    {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"window_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"prompt_budgets", ort::ElementType::kInt64, true, kShape_B},
    {"pool_kernels", ort::ElementType::kInt64, true, kShape_B}};
inline constexpr TensorSpec kKvcCompactTurn_int8Outputs[] = {
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"v_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"bounds", ort::ElementType::kFloat, true, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr TensorSpec kKvcCompactTurn_int8_fp8_boundsInputs[] = {
    {"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
    {"k", ort::ElementType::kInt8, false, kShape_B_G_S_D},
    {"joined_k_scale", ort::ElementType::kFloat16, false, kShape_B_G_S_1},
    {"v", ort::ElementType::kInt8, false, kShape_B_G_S_D},
    {"joined_v_scale", ort::ElementType::kFloat16, false, kShape_B_G_S_1},
    {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"window_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"prompt_budgets", ort::ElementType::kInt64, true, kShape_B},
    {"pool_kernels", ort::ElementType::kInt64, true, kShape_B}};
inline constexpr TensorSpec kKvcCompactTurn_int8_fp8_boundsOutputs[] = {
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"v_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"bounds", ort::ElementType::kInt8, true, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr TensorSpec kKvcCompactTurn_fp8Inputs[] = {
    {"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
    {"k", ort::ElementType::kInt8, false, kShape_B_G_S_D},
    {"joined_k_scale", ort::ElementType::kInt8, false, kShape_B_G_S_1},
    {"v", ort::ElementType::kInt8, false, kShape_B_G_S_D},
    {"joined_v_scale", ort::ElementType::kInt8, false, kShape_B_G_S_1},
    {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"window_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"prompt_budgets", ort::ElementType::kInt64, true, kShape_B},
    {"pool_kernels", ort::ElementType::kInt64, true, kShape_B}};
inline constexpr TensorSpec kKvcCompactTurn_fp8Outputs[] = {
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale", ort::ElementType::kInt8, false, kShape_B_G_C_1},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"v_scale", ort::ElementType::kInt8, false, kShape_B_G_C_1},
    {"bounds", ort::ElementType::kFloat, true, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr TensorSpec kKvcCompactTurn_fp8_fp8_boundsInputs[] = {
    {"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
    {"k", ort::ElementType::kInt8, false, kShape_B_G_S_D},
    {"joined_k_scale", ort::ElementType::kInt8, false, kShape_B_G_S_1},
    {"v", ort::ElementType::kInt8, false, kShape_B_G_S_D},
    {"joined_v_scale", ort::ElementType::kInt8, false, kShape_B_G_S_1},
    {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"window_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"prompt_budgets", ort::ElementType::kInt64, true, kShape_B},
    {"pool_kernels", ort::ElementType::kInt64, true, kShape_B}};
inline constexpr TensorSpec kKvcCompactTurn_fp8_fp8_boundsOutputs[] = {
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale", ort::ElementType::kInt8, false, kShape_B_G_C_1},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"v_scale", ort::ElementType::kInt8, false, kShape_B_G_C_1},
    {"bounds", ort::ElementType::kInt8, true, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr TensorSpec kKvcCompactTurn_int4Inputs[] = {
    {"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
    {"k", ort::ElementType::kInt8, false, kShape_B_G_S_DOver2},
    {"joined_k_scale", ort::ElementType::kFloat16, false, kShape_B_G_S_groups},
    {"joined_k_minimum", ort::ElementType::kFloat16, false, kShape_B_G_S_groups},
    {"v", ort::ElementType::kInt8, false, kShape_B_G_S_DOver2},
    {"joined_v_scale", ort::ElementType::kFloat16, false, kShape_B_G_S_groups},
    {"joined_v_minimum", ort::ElementType::kFloat16, false, kShape_B_G_S_groups},
    {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"window_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"prompt_budgets", ort::ElementType::kInt64, true, kShape_B},
    {"pool_kernels", ort::ElementType::kInt64, true, kShape_B}};
inline constexpr TensorSpec kKvcCompactTurn_int4Outputs[] = {
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"k_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"k_minimum", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"v_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_minimum", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"bounds", ort::ElementType::kFloat, true, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr TensorSpec kKvcCompactTurn_int4_fp8_boundsInputs[] = {
    {"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
    {"k", ort::ElementType::kInt8, false, kShape_B_G_S_DOver2},
    {"joined_k_scale", ort::ElementType::kFloat16, false, kShape_B_G_S_groups},
    {"joined_k_minimum", ort::ElementType::kFloat16, false, kShape_B_G_S_groups},
    {"v", ort::ElementType::kInt8, false, kShape_B_G_S_DOver2},
    {"joined_v_scale", ort::ElementType::kFloat16, false, kShape_B_G_S_groups},
    {"joined_v_minimum", ort::ElementType::kFloat16, false, kShape_B_G_S_groups},
    {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"window_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"prompt_budgets", ort::ElementType::kInt64, true, kShape_B},
    {"pool_kernels", ort::ElementType::kInt64, true, kShape_B}};
inline constexpr TensorSpec kKvcCompactTurn_int4_fp8_boundsOutputs[] = {
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"k_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"k_minimum", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"v_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_minimum", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"bounds", ort::ElementType::kInt8, true, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr TensorSpec kKvcCompactTurn_k8v4Inputs[] = {
    {"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
    {"k", ort::ElementType::kInt8, false, kShape_B_G_S_D},
    {"joined_k_scale", ort::ElementType::kFloat16, false, kShape_B_G_S_1},
    {"v", ort::ElementType::kInt8, false, kShape_B_G_S_DOver2},
    {"joined_v_scale", ort::ElementType::kFloat16, false, kShape_B_G_S_groups},
    {"joined_v_minimum", ort::ElementType::kFloat16, false, kShape_B_G_S_groups},
    {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"window_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"prompt_budgets", ort::ElementType::kInt64, true, kShape_B},
    {"pool_kernels", ort::ElementType::kInt64, true, kShape_B}};
inline constexpr TensorSpec kKvcCompactTurn_k8v4Outputs[] = {
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"v_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_minimum", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"bounds", ort::ElementType::kFloat, true, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr TensorSpec kKvcCompactTurn_k8v4_fp8_boundsInputs[] = {
    {"q_window", ort::ElementType::kFloat, false, kShape_B_H_W_D},
    {"k", ort::ElementType::kInt8, false, kShape_B_G_S_D},
    {"joined_k_scale", ort::ElementType::kFloat16, false, kShape_B_G_S_1},
    {"v", ort::ElementType::kInt8, false, kShape_B_G_S_DOver2},
    {"joined_v_scale", ort::ElementType::kFloat16, false, kShape_B_G_S_groups},
    {"joined_v_minimum", ort::ElementType::kFloat16, false, kShape_B_G_S_groups},
    {"prompt_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"window_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"prompt_budgets", ort::ElementType::kInt64, true, kShape_B},
    {"pool_kernels", ort::ElementType::kInt64, true, kShape_B}};
inline constexpr TensorSpec kKvcCompactTurn_k8v4_fp8_boundsOutputs[] = {
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"v_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_minimum", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"bounds", ort::ElementType::kInt8, true, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"indices", ort::ElementType::kInt32, false, kShape_B_G_C}};
inline constexpr Schema kKvcCompactTurn[] = {
    {"KvcCompactTurn", kKvcCompactTurnInputs, kKvcCompactTurnOutputs, VectorFormat::kExact, VectorFormat::kExact,
     false},
    {"KvcCompactTurn_fp8_bounds", kKvcCompactTurn_fp8_boundsInputs, kKvcCompactTurn_fp8_boundsOutputs,
     VectorFormat::kExact, VectorFormat::kExact, true},
    {"KvcCompactTurn_int8", kKvcCompactTurn_int8Inputs, kKvcCompactTurn_int8Outputs, VectorFormat::kInt8,
     VectorFormat::kInt8, false},
    {"KvcCompactTurn_int8_fp8_bounds", kKvcCompactTurn_int8_fp8_boundsInputs, kKvcCompactTurn_int8_fp8_boundsOutputs,
     VectorFormat::kInt8, VectorFormat::kInt8, true},
    {"KvcCompactTurn_fp8", kKvcCompactTurn_fp8Inputs, kKvcCompactTurn_fp8Outputs, VectorFormat::kFp8,
     VectorFormat::kFp8, false},
    {"KvcCompactTurn_fp8_fp8_bounds", kKvcCompactTurn_fp8_fp8_boundsInputs, kKvcCompactTurn_fp8_fp8_boundsOutputs,
     VectorFormat::kFp8, VectorFormat::kFp8, true},
    {"KvcCompactTurn_int4", kKvcCompactTurn_int4Inputs, kKvcCompactTurn_int4Outputs, VectorFormat::kInt4,
     VectorFormat::kInt4, false},
    {"KvcCompactTurn_int4_fp8_bounds", kKvcCompactTurn_int4_fp8_boundsInputs, kKvcCompactTurn_int4_fp8_boundsOutputs,
     VectorFormat::kInt4, VectorFormat::kInt4, true},
    {"KvcCompactTurn_k8v4", kKvcCompactTurn_k8v4Inputs, kKvcCompactTurn_k8v4Outputs, VectorFormat::kInt8,
     VectorFormat::kInt4, false},
    {"KvcCompactTurn_k8v4_fp8_bounds", kKvcCompactTurn_k8v4_fp8_boundsInputs, kKvcCompactTurn_k8v4_fp8_boundsOutputs,
     VectorFormat::kInt8, VectorFormat::kInt4, true}};

// A linear layer (Gated DeltaNet) takes the tokens of a prompt or a turn into its state, and is read.
inline constexpr TensorSpec kKvcDeltaRuleInputs[] = {
    {"mixed", ort::ElementType::kFloat, false, kShape_B_M_Channels},
    {"write", ort::ElementType::kFloat, false, kShape_B_M_ValueHeads},
    {"decay", ort::ElementType::kFloat, false, kShape_B_M_ValueHeads},
    {"lengths", ort::ElementType::kInt64, false, kShape_B},
    {"convolution", ort::ElementType::kFloat, false, kShape_Channels_One_Kernel},
    {"decay_log", ort::ElementType::kFloat, false, kShape_ValueHeads},
    {"decay_bias", ort::ElementType::kFloat, false, kShape_ValueHeads},
    {"last_inputs", ort::ElementType::kFloat, false, kShape_B_Before_Channels},
    {"memory", ort::ElementType::kFloat, false, kShape_B_ValueHeads_KeySize_ValueSize}};
inline constexpr TensorSpec kKvcDeltaRuleOutputs[] = {
    {"output", ort::ElementType::kFloat, false, kShape_B_M_ValueHeads_ValueSize},
    {"last_inputs_out", ort::ElementType::kFloat, false, kShape_B_Before_Channels},
    {"memory_out", ort::ElementType::kFloat, false, kShape_B_ValueHeads_KeySize_ValueSize}};
inline constexpr Schema kKvcDeltaRule[] = {
    {"KvcDeltaRule", kKvcDeltaRuleInputs, kKvcDeltaRuleOutputs, VectorFormat::kExact, VectorFormat::kExact, false}};

// A linear layer (Gated DeltaNet) takes one token of each row into its state, and is read.
inline constexpr TensorSpec kKvcDeltaStepInputs[] = {
    {"mixed", ort::ElementType::kFloat, false, kShape_B_Channels},
    {"write", ort::ElementType::kFloat, false, kShape_B_ValueHeads},
    {"decay", ort::ElementType::kFloat, false, kShape_B_ValueHeads},
    {"convolution", ort::ElementType::kFloat, false, kShape_Channels_One_Kernel},
    {"decay_log", ort::ElementType::kFloat, false, kShape_ValueHeads},
    {"decay_bias", ort::ElementType::kFloat, false, kShape_ValueHeads},
    {"last_inputs", ort::ElementType::kFloat, false, kShape_B_Before_Channels},
    {"memory", ort::ElementType::kFloat, false, kShape_B_ValueHeads_KeySize_ValueSize}};
inline constexpr TensorSpec kKvcDeltaStepOutputs[] = {
    {"output", ort::ElementType::kFloat, false, kShape_B_ValueHeads_ValueSize},
    {"last_inputs_out", ort::ElementType::kFloat, false, kShape_B_Before_Channels},
    {"memory_out", ort::ElementType::kFloat, false, kShape_B_ValueHeads_KeySize_ValueSize}};
inline constexpr Schema kKvcDeltaStep[] = {
    {"KvcDeltaStep", kKvcDeltaStepInputs, kKvcDeltaStepOutputs, VectorFormat::kExact, VectorFormat::kExact, false}};

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
inline constexpr TensorSpec kKvcDenseAttention_int8Inputs[] = {
    {"query", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"k_new", ort::ElementType::kFloat, false, kShape_B_G_D},
    {"v_new", ort::ElementType::kFloat, false, kShape_B_G_D},
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"v_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcDenseAttention_int8Outputs[] = {
    {"output", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"k_cache_out", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale_out", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"v_cache_out", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"v_scale_out", ort::ElementType::kFloat16, false, kShape_B_G_C_1}};
inline constexpr TensorSpec kKvcDenseAttention_fp8Inputs[] = {
    {"query", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"k_new", ort::ElementType::kFloat, false, kShape_B_G_D},
    {"v_new", ort::ElementType::kFloat, false, kShape_B_G_D},
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale", ort::ElementType::kInt8, false, kShape_B_G_C_1},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"v_scale", ort::ElementType::kInt8, false, kShape_B_G_C_1},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcDenseAttention_fp8Outputs[] = {
    {"output", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"k_cache_out", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale_out", ort::ElementType::kInt8, false, kShape_B_G_C_1},
    {"v_cache_out", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"v_scale_out", ort::ElementType::kInt8, false, kShape_B_G_C_1}};
inline constexpr TensorSpec kKvcDenseAttention_int4Inputs[] = {
    {"query", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"k_new", ort::ElementType::kFloat, false, kShape_B_G_D},
    {"v_new", ort::ElementType::kFloat, false, kShape_B_G_D},
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"k_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"k_minimum", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"v_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_minimum", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcDenseAttention_int4Outputs[] = {
    {"output", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"k_cache_out", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"k_scale_out", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"k_minimum_out", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_cache_out", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"v_scale_out", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_minimum_out", ort::ElementType::kFloat16, false, kShape_B_G_C_groups}};
inline constexpr TensorSpec kKvcDenseAttention_k8v4Inputs[] = {
    {"query", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"k_new", ort::ElementType::kFloat, false, kShape_B_G_D},
    {"v_new", ort::ElementType::kFloat, false, kShape_B_G_D},
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"v_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_minimum", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcDenseAttention_k8v4Outputs[] = {
    {"output", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"k_cache_out", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale_out", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"v_cache_out", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"v_scale_out", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_minimum_out", ort::ElementType::kFloat16, false, kShape_B_G_C_groups}};
inline constexpr Schema kKvcDenseAttention[] = {
    {"KvcDenseAttention", kKvcDenseAttentionInputs, kKvcDenseAttentionOutputs, VectorFormat::kExact,
     VectorFormat::kExact, false},
    {"KvcDenseAttention_int8", kKvcDenseAttention_int8Inputs, kKvcDenseAttention_int8Outputs, VectorFormat::kInt8,
     VectorFormat::kInt8, false},
    {"KvcDenseAttention_fp8", kKvcDenseAttention_fp8Inputs, kKvcDenseAttention_fp8Outputs, VectorFormat::kFp8,
     VectorFormat::kFp8, false},
    {"KvcDenseAttention_int4", kKvcDenseAttention_int4Inputs, kKvcDenseAttention_int4Outputs, VectorFormat::kInt4,
     VectorFormat::kInt4, false},
    {"KvcDenseAttention_k8v4", kKvcDenseAttention_k8v4Inputs, kKvcDenseAttention_k8v4Outputs, VectorFormat::kInt8,
     VectorFormat::kInt4, false}};

// A feed-forward block of experts, of which a router chooses some for each token.
inline constexpr TensorSpec kKvcExpertsInputs[] = {{"x", ort::ElementType::kFloat, false, kShape_T_In},
                                                   {"router", ort::ElementType::kFloat, false, kShape_Experts_In},
                                                   {"gate", ort::ElementType::kFloat, false, kShape_Experts_Inner_In},
                                                   {"up", ort::ElementType::kFloat, false, kShape_Experts_Inner_In},
                                                   {"down", ort::ElementType::kFloat, false, kShape_Experts_In_Inner}};
inline constexpr TensorSpec kKvcExpertsOutputs[] = {{"y", ort::ElementType::kFloat, false, kShape_T_In}};
inline constexpr Schema kKvcExperts[] = {
    {"KvcExperts", kKvcExpertsInputs, kKvcExpertsOutputs, VectorFormat::kExact, VectorFormat::kExact, false}};

// Exact attention of a turn's tokens to everything stored, and causally to each other.
inline constexpr TensorSpec kKvcExtendAttentionInputs[] = {
    {"q", ort::ElementType::kFloat, false, kShape_B_H_M_D},
    {"k", ort::ElementType::kFloat, false, kShape_B_G_T_D},
    {"v", ort::ElementType::kFloat, false, kShape_B_G_T_D},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcExtendAttentionOutputs[] = {{"o", ort::ElementType::kFloat, false, kShape_B_H_M_D}};
inline constexpr TensorSpec kKvcExtendAttention_int8Inputs[] = {
    {"q", ort::ElementType::kFloat, false, kShape_B_H_M_D},
    {"k", ort::ElementType::kInt8, false, kShape_B_G_T_D},
    {"joined_k_scale", ort::ElementType::kFloat16, false, kShape_B_G_T_1},
    {"v", ort::ElementType::kInt8, false, kShape_B_G_T_D},
    {"joined_v_scale", ort::ElementType::kFloat16, false, kShape_B_G_T_1},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcExtendAttention_int8Outputs[] = {
    {"o", ort::ElementType::kFloat, false, kShape_B_H_M_D}};
inline constexpr TensorSpec kKvcExtendAttention_fp8Inputs[] = {
    {"q", ort::ElementType::kFloat, false, kShape_B_H_M_D},
    {"k", ort::ElementType::kInt8, false, kShape_B_G_T_D},
    {"joined_k_scale", ort::ElementType::kInt8, false, kShape_B_G_T_1},
    {"v", ort::ElementType::kInt8, false, kShape_B_G_T_D},
    {"joined_v_scale", ort::ElementType::kInt8, false, kShape_B_G_T_1},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcExtendAttention_fp8Outputs[] = {{"o", ort::ElementType::kFloat, false, kShape_B_H_M_D}};
inline constexpr TensorSpec kKvcExtendAttention_int4Inputs[] = {
    {"q", ort::ElementType::kFloat, false, kShape_B_H_M_D},
    {"k", ort::ElementType::kInt8, false, kShape_B_G_T_DOver2},
    {"joined_k_scale", ort::ElementType::kFloat16, false, kShape_B_G_T_groups},
    {"joined_k_minimum", ort::ElementType::kFloat16, false, kShape_B_G_T_groups},
    {"v", ort::ElementType::kInt8, false, kShape_B_G_T_DOver2},
    {"joined_v_scale", ort::ElementType::kFloat16, false, kShape_B_G_T_groups},
    {"joined_v_minimum", ort::ElementType::kFloat16, false, kShape_B_G_T_groups},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcExtendAttention_int4Outputs[] = {
    {"o", ort::ElementType::kFloat, false, kShape_B_H_M_D}};
inline constexpr TensorSpec kKvcExtendAttention_k8v4Inputs[] = {
    {"q", ort::ElementType::kFloat, false, kShape_B_H_M_D},
    {"k", ort::ElementType::kInt8, false, kShape_B_G_T_D},
    {"joined_k_scale", ort::ElementType::kFloat16, false, kShape_B_G_T_1},
    {"v", ort::ElementType::kInt8, false, kShape_B_G_T_DOver2},
    {"joined_v_scale", ort::ElementType::kFloat16, false, kShape_B_G_T_groups},
    {"joined_v_minimum", ort::ElementType::kFloat16, false, kShape_B_G_T_groups},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcExtendAttention_k8v4Outputs[] = {
    {"o", ort::ElementType::kFloat, false, kShape_B_H_M_D}};
inline constexpr Schema kKvcExtendAttention[] = {
    {"KvcExtendAttention", kKvcExtendAttentionInputs, kKvcExtendAttentionOutputs, VectorFormat::kExact,
     VectorFormat::kExact, false},
    {"KvcExtendAttention_int8", kKvcExtendAttention_int8Inputs, kKvcExtendAttention_int8Outputs, VectorFormat::kInt8,
     VectorFormat::kInt8, false},
    {"KvcExtendAttention_fp8", kKvcExtendAttention_fp8Inputs, kKvcExtendAttention_fp8Outputs, VectorFormat::kFp8,
     VectorFormat::kFp8, false},
    {"KvcExtendAttention_int4", kKvcExtendAttention_int4Inputs, kKvcExtendAttention_int4Outputs, VectorFormat::kInt4,
     VectorFormat::kInt4, false},
    {"KvcExtendAttention_k8v4", kKvcExtendAttention_k8v4Inputs, kKvcExtendAttention_k8v4Outputs, VectorFormat::kInt8,
     VectorFormat::kInt4, false}};

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
inline constexpr TensorSpec kKvcHybridAttention_fp8_boundsInputs[] = {
    {"query", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"k_new", ort::ElementType::kFloat, false, kShape_B_G_D},
    {"v_new", ort::ElementType::kFloat, false, kShape_B_G_D},
    {"k_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"v_cache", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"bounds", ort::ElementType::kInt8, false, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcHybridAttention_fp8_boundsOutputs[] = {
    {"output", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"k_cache_out", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"v_cache_out", ort::ElementType::kFloat, false, kShape_B_G_C_D},
    {"bounds_out", ort::ElementType::kInt8, false, kShape_B_G_2D_P},
    {"selected", ort::ElementType::kInt32, true, kShape_B_G_K}};
inline constexpr TensorSpec kKvcHybridAttention_int8Inputs[] = {
    {"query", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"k_new", ort::ElementType::kFloat, false, kShape_B_G_D},
    {"v_new", ort::ElementType::kFloat, false, kShape_B_G_D},
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"v_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"bounds", ort::ElementType::kFloat, false, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcHybridAttention_int8Outputs[] = {
    {"output", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"k_cache_out", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale_out", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"v_cache_out", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"v_scale_out", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"bounds_out", ort::ElementType::kFloat, false, kShape_B_G_2D_P},
    {"selected", ort::ElementType::kInt32, true, kShape_B_G_K}};
inline constexpr TensorSpec kKvcHybridAttention_int8_fp8_boundsInputs[] = {
    {"query", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"k_new", ort::ElementType::kFloat, false, kShape_B_G_D},
    {"v_new", ort::ElementType::kFloat, false, kShape_B_G_D},
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"v_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"bounds", ort::ElementType::kInt8, false, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcHybridAttention_int8_fp8_boundsOutputs[] = {
    {"output", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"k_cache_out", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale_out", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"v_cache_out", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"v_scale_out", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"bounds_out", ort::ElementType::kInt8, false, kShape_B_G_2D_P},
    {"selected", ort::ElementType::kInt32, true, kShape_B_G_K}};
inline constexpr TensorSpec kKvcHybridAttention_fp8Inputs[] = {
    {"query", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"k_new", ort::ElementType::kFloat, false, kShape_B_G_D},
    {"v_new", ort::ElementType::kFloat, false, kShape_B_G_D},
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale", ort::ElementType::kInt8, false, kShape_B_G_C_1},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"v_scale", ort::ElementType::kInt8, false, kShape_B_G_C_1},
    {"bounds", ort::ElementType::kFloat, false, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcHybridAttention_fp8Outputs[] = {
    {"output", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"k_cache_out", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale_out", ort::ElementType::kInt8, false, kShape_B_G_C_1},
    {"v_cache_out", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"v_scale_out", ort::ElementType::kInt8, false, kShape_B_G_C_1},
    {"bounds_out", ort::ElementType::kFloat, false, kShape_B_G_2D_P},
    {"selected", ort::ElementType::kInt32, true, kShape_B_G_K}};
inline constexpr TensorSpec kKvcHybridAttention_fp8_fp8_boundsInputs[] = {
    {"query", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"k_new", ort::ElementType::kFloat, false, kShape_B_G_D},
    {"v_new", ort::ElementType::kFloat, false, kShape_B_G_D},
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale", ort::ElementType::kInt8, false, kShape_B_G_C_1},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"v_scale", ort::ElementType::kInt8, false, kShape_B_G_C_1},
    {"bounds", ort::ElementType::kInt8, false, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcHybridAttention_fp8_fp8_boundsOutputs[] = {
    {"output", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"k_cache_out", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale_out", ort::ElementType::kInt8, false, kShape_B_G_C_1},
    {"v_cache_out", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"v_scale_out", ort::ElementType::kInt8, false, kShape_B_G_C_1},
    {"bounds_out", ort::ElementType::kInt8, false, kShape_B_G_2D_P},
    {"selected", ort::ElementType::kInt32, true, kShape_B_G_K}};
inline constexpr TensorSpec kKvcHybridAttention_int4Inputs[] = {
    {"query", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"k_new", ort::ElementType::kFloat, false, kShape_B_G_D},
    {"v_new", ort::ElementType::kFloat, false, kShape_B_G_D},
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"k_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"k_minimum", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"v_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_minimum", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"bounds", ort::ElementType::kFloat, false, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcHybridAttention_int4Outputs[] = {
    {"output", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"k_cache_out", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"k_scale_out", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"k_minimum_out", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_cache_out", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"v_scale_out", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_minimum_out", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"bounds_out", ort::ElementType::kFloat, false, kShape_B_G_2D_P},
    {"selected", ort::ElementType::kInt32, true, kShape_B_G_K}};
inline constexpr TensorSpec kKvcHybridAttention_int4_fp8_boundsInputs[] = {
    {"query", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"k_new", ort::ElementType::kFloat, false, kShape_B_G_D},
    {"v_new", ort::ElementType::kFloat, false, kShape_B_G_D},
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"k_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"k_minimum", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"v_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_minimum", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"bounds", ort::ElementType::kInt8, false, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcHybridAttention_int4_fp8_boundsOutputs[] = {
    {"output", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"k_cache_out", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"k_scale_out", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"k_minimum_out", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_cache_out", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"v_scale_out", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_minimum_out", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"bounds_out", ort::ElementType::kInt8, false, kShape_B_G_2D_P},
    {"selected", ort::ElementType::kInt32, true, kShape_B_G_K}};
inline constexpr TensorSpec kKvcHybridAttention_k8v4Inputs[] = {
    {"query", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"k_new", ort::ElementType::kFloat, false, kShape_B_G_D},
    {"v_new", ort::ElementType::kFloat, false, kShape_B_G_D},
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"v_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_minimum", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"bounds", ort::ElementType::kFloat, false, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcHybridAttention_k8v4Outputs[] = {
    {"output", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"k_cache_out", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale_out", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"v_cache_out", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"v_scale_out", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_minimum_out", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"bounds_out", ort::ElementType::kFloat, false, kShape_B_G_2D_P},
    {"selected", ort::ElementType::kInt32, true, kShape_B_G_K}};
inline constexpr TensorSpec kKvcHybridAttention_k8v4_fp8_boundsInputs[] = {
    {"query", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"k_new", ort::ElementType::kFloat, false, kShape_B_G_D},
    {"v_new", ort::ElementType::kFloat, false, kShape_B_G_D},
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"v_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_minimum", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"bounds", ort::ElementType::kInt8, false, kShape_B_G_2D_P},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcHybridAttention_k8v4_fp8_boundsOutputs[] = {
    {"output", ort::ElementType::kFloat, false, kShape_B_H_D},
    {"k_cache_out", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale_out", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"v_cache_out", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"v_scale_out", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_minimum_out", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"bounds_out", ort::ElementType::kInt8, false, kShape_B_G_2D_P},
    {"selected", ort::ElementType::kInt32, true, kShape_B_G_K}};
inline constexpr Schema kKvcHybridAttention[] = {
    {"KvcHybridAttention", kKvcHybridAttentionInputs, kKvcHybridAttentionOutputs, VectorFormat::kExact,
     VectorFormat::kExact, false},
    {"KvcHybridAttention_fp8_bounds", kKvcHybridAttention_fp8_boundsInputs, kKvcHybridAttention_fp8_boundsOutputs,
     VectorFormat::kExact, VectorFormat::kExact, true},
    {"KvcHybridAttention_int8", kKvcHybridAttention_int8Inputs, kKvcHybridAttention_int8Outputs, VectorFormat::kInt8,
     VectorFormat::kInt8, false},
    {"KvcHybridAttention_int8_fp8_bounds", kKvcHybridAttention_int8_fp8_boundsInputs,
     kKvcHybridAttention_int8_fp8_boundsOutputs, VectorFormat::kInt8, VectorFormat::kInt8, true},
    {"KvcHybridAttention_fp8", kKvcHybridAttention_fp8Inputs, kKvcHybridAttention_fp8Outputs, VectorFormat::kFp8,
     VectorFormat::kFp8, false},
    {"KvcHybridAttention_fp8_fp8_bounds", kKvcHybridAttention_fp8_fp8_boundsInputs,
     kKvcHybridAttention_fp8_fp8_boundsOutputs, VectorFormat::kFp8, VectorFormat::kFp8, true},
    {"KvcHybridAttention_int4", kKvcHybridAttention_int4Inputs, kKvcHybridAttention_int4Outputs, VectorFormat::kInt4,
     VectorFormat::kInt4, false},
    {"KvcHybridAttention_int4_fp8_bounds", kKvcHybridAttention_int4_fp8_boundsInputs,
     kKvcHybridAttention_int4_fp8_boundsOutputs, VectorFormat::kInt4, VectorFormat::kInt4, true},
    {"KvcHybridAttention_k8v4", kKvcHybridAttention_k8v4Inputs, kKvcHybridAttention_k8v4Outputs, VectorFormat::kInt8,
     VectorFormat::kInt4, false},
    {"KvcHybridAttention_k8v4_fp8_bounds", kKvcHybridAttention_k8v4_fp8_boundsInputs,
     kKvcHybridAttention_k8v4_fp8_boundsOutputs, VectorFormat::kInt8, VectorFormat::kInt4, true}};

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
inline constexpr TensorSpec kKvcJoinBlock_int8Inputs[] = {
    {"k_new", ort::ElementType::kFloat, false, kShape_B_G_M_D},
    {"v_new", ort::ElementType::kFloat, false, kShape_B_G_M_D},
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"v_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcJoinBlock_int8Outputs[] = {
    {"k", ort::ElementType::kInt8, false, kShape_B_G_CAndM_D},
    {"joined_k_scale", ort::ElementType::kFloat16, false, kShape_B_G_CAndM_1},
    {"v", ort::ElementType::kInt8, false, kShape_B_G_CAndM_D},
    {"joined_v_scale", ort::ElementType::kFloat16, false, kShape_B_G_CAndM_1},
    {"joined_lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcJoinBlock_fp8Inputs[] = {{"k_new", ort::ElementType::kFloat, false, kShape_B_G_M_D},
                                                         {"v_new", ort::ElementType::kFloat, false, kShape_B_G_M_D},
                                                         {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
                                                         {"k_scale", ort::ElementType::kInt8, false, kShape_B_G_C_1},
                                                         {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
                                                         {"v_scale", ort::ElementType::kInt8, false, kShape_B_G_C_1},
                                                         {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
                                                         {"lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcJoinBlock_fp8Outputs[] = {
    {"k", ort::ElementType::kInt8, false, kShape_B_G_CAndM_D},
    {"joined_k_scale", ort::ElementType::kInt8, false, kShape_B_G_CAndM_1},
    {"v", ort::ElementType::kInt8, false, kShape_B_G_CAndM_D},
    {"joined_v_scale", ort::ElementType::kInt8, false, kShape_B_G_CAndM_1},
    {"joined_lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcJoinBlock_int4Inputs[] = {
    {"k_new", ort::ElementType::kFloat, false, kShape_B_G_M_D},
    {"v_new", ort::ElementType::kFloat, false, kShape_B_G_M_D},
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"k_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"k_minimum", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"v_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_minimum", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcJoinBlock_int4Outputs[] = {
    {"k", ort::ElementType::kInt8, false, kShape_B_G_CAndM_DOver2},
    {"joined_k_scale", ort::ElementType::kFloat16, false, kShape_B_G_CAndM_groups},
    {"joined_k_minimum", ort::ElementType::kFloat16, false, kShape_B_G_CAndM_groups},
    {"v", ort::ElementType::kInt8, false, kShape_B_G_CAndM_DOver2},
    {"joined_v_scale", ort::ElementType::kFloat16, false, kShape_B_G_CAndM_groups},
    {"joined_v_minimum", ort::ElementType::kFloat16, false, kShape_B_G_CAndM_groups},
    {"joined_lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcJoinBlock_k8v4Inputs[] = {
    {"k_new", ort::ElementType::kFloat, false, kShape_B_G_M_D},
    {"v_new", ort::ElementType::kFloat, false, kShape_B_G_M_D},
    {"k_cache", ort::ElementType::kInt8, false, kShape_B_G_C_D},
    {"k_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_1},
    {"v_cache", ort::ElementType::kInt8, false, kShape_B_G_C_DOver2},
    {"v_scale", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"v_minimum", ort::ElementType::kFloat16, false, kShape_B_G_C_groups},
    {"cache_lengths", ort::ElementType::kInt64, false, kShape_B},
    {"lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr TensorSpec kKvcJoinBlock_k8v4Outputs[] = {
    {"k", ort::ElementType::kInt8, false, kShape_B_G_CAndM_D},
    {"joined_k_scale", ort::ElementType::kFloat16, false, kShape_B_G_CAndM_1},
    {"v", ort::ElementType::kInt8, false, kShape_B_G_CAndM_DOver2},
    {"joined_v_scale", ort::ElementType::kFloat16, false, kShape_B_G_CAndM_groups},
    {"joined_v_minimum", ort::ElementType::kFloat16, false, kShape_B_G_CAndM_groups},
    {"joined_lengths", ort::ElementType::kInt64, false, kShape_B}};
inline constexpr Schema kKvcJoinBlock[] = {
    {"KvcJoinBlock", kKvcJoinBlockInputs, kKvcJoinBlockOutputs, VectorFormat::kExact, VectorFormat::kExact, false},
    {"KvcJoinBlock_int8", kKvcJoinBlock_int8Inputs, kKvcJoinBlock_int8Outputs, VectorFormat::kInt8, VectorFormat::kInt8,
     false},
    {"KvcJoinBlock_fp8", kKvcJoinBlock_fp8Inputs, kKvcJoinBlock_fp8Outputs, VectorFormat::kFp8, VectorFormat::kFp8,
     false},
    {"KvcJoinBlock_int4", kKvcJoinBlock_int4Inputs, kKvcJoinBlock_int4Outputs, VectorFormat::kInt4, VectorFormat::kInt4,
     false},
    {"KvcJoinBlock_k8v4", kKvcJoinBlock_k8v4Inputs, kKvcJoinBlock_k8v4Outputs, VectorFormat::kInt8, VectorFormat::kInt4,
     false}};

// Exact causal attention over the prompt, in memory linear in its length.
inline constexpr TensorSpec kKvcPrefillAttentionInputs[] = {{"q", ort::ElementType::kFloat, false, kShape_B_H_M_D},
                                                            {"k", ort::ElementType::kFloat, false, kShape_B_G_S_D},
                                                            {"v", ort::ElementType::kFloat, false, kShape_B_G_S_D}};
inline constexpr TensorSpec kKvcPrefillAttentionOutputs[] = {{"o", ort::ElementType::kFloat, false, kShape_B_H_M_D}};
inline constexpr Schema kKvcPrefillAttention[] = {{"KvcPrefillAttention", kKvcPrefillAttentionInputs,
                                                   kKvcPrefillAttentionOutputs, VectorFormat::kExact,
                                                   VectorFormat::kExact, false}};

// KvcClampedExperts with matrices in 4 or 8 bits.
inline constexpr TensorSpec kKvcQuantisedClampedExpertsInputs[] = {
    {"x", ort::ElementType::kFloat, false, kShape_T_In},
    {"router", ort::ElementType::kFloat, false, kShape_Experts_In},
    {"gate_packed", ort::ElementType::kUint8, false, kShape_Experts_Inner_InBlocks_Bytes},
    {"gate_scales", ort::ElementType::kFloat16, false, kShape_Experts_Inner_InBlocks},
    {"up_packed", ort::ElementType::kUint8, false, kShape_Experts_Inner_InBlocks_Bytes},
    {"up_scales", ort::ElementType::kFloat16, false, kShape_Experts_Inner_InBlocks},
    {"down_packed", ort::ElementType::kUint8, false, kShape_Experts_In_InnerBlocks_Bytes},
    {"down_scales", ort::ElementType::kFloat16, false, kShape_Experts_In_InnerBlocks},
    {"router_bias", ort::ElementType::kFloat, false, kShape_Experts},
    {"gate_bias", ort::ElementType::kFloat, false, kShape_Experts_Inner},
    {"up_bias", ort::ElementType::kFloat, false, kShape_Experts_Inner},
    {"down_bias", ort::ElementType::kFloat, false, kShape_Experts_In},
    {"gate_limit", ort::ElementType::kFloat, false, kShape_1},
    {"gate_gain", ort::ElementType::kFloat, false, kShape_1}};
inline constexpr TensorSpec kKvcQuantisedClampedExpertsOutputs[] = {
    {"y", ort::ElementType::kFloat, false, kShape_T_In}};
inline constexpr Schema kKvcQuantisedClampedExperts[] = {
    {"KvcQuantisedClampedExperts", kKvcQuantisedClampedExpertsInputs, kKvcQuantisedClampedExpertsOutputs,
     VectorFormat::kExact, VectorFormat::kExact, false}};

// KvcExperts with matrices in 4 or 8 bits.
inline constexpr TensorSpec kKvcQuantisedExpertsInputs[] = {
    {"x", ort::ElementType::kFloat, false, kShape_T_In},
    {"router", ort::ElementType::kFloat, false, kShape_Experts_In},
    {"gate_packed", ort::ElementType::kUint8, false, kShape_Experts_Inner_InBlocks_Bytes},
    {"gate_scales", ort::ElementType::kFloat16, false, kShape_Experts_Inner_InBlocks},
    {"up_packed", ort::ElementType::kUint8, false, kShape_Experts_Inner_InBlocks_Bytes},
    {"up_scales", ort::ElementType::kFloat16, false, kShape_Experts_Inner_InBlocks},
    {"down_packed", ort::ElementType::kUint8, false, kShape_Experts_In_InnerBlocks_Bytes},
    {"down_scales", ort::ElementType::kFloat16, false, kShape_Experts_In_InnerBlocks}};
inline constexpr TensorSpec kKvcQuantisedExpertsOutputs[] = {{"y", ort::ElementType::kFloat, false, kShape_T_In}};
inline constexpr Schema kKvcQuantisedExperts[] = {{"KvcQuantisedExperts", kKvcQuantisedExpertsInputs,
                                                   kKvcQuantisedExpertsOutputs, VectorFormat::kExact,
                                                   VectorFormat::kExact, false}};

// Product with a matrix in 4 or 8 bits; the input is rounded to 8 bits, or 15 where it is wide.
inline constexpr TensorSpec kKvcQuantisedLinearInputs[] = {
    {"x", ort::ElementType::kFloat, false, kShape_T_In},
    {"packed", ort::ElementType::kUint8, false, kShape_Out_Blocks_Bytes},
    {"scales", ort::ElementType::kFloat16, false, kShape_Out_Blocks}};
inline constexpr TensorSpec kKvcQuantisedLinearOutputs[] = {{"y", ort::ElementType::kFloat, false, kShape_T_Out}};
inline constexpr Schema kKvcQuantisedLinear[] = {{"KvcQuantisedLinear", kKvcQuantisedLinearInputs,
                                                  kKvcQuantisedLinearOutputs, VectorFormat::kExact,
                                                  VectorFormat::kExact, false}};

}  // namespace schemas

}  // namespace kvc
