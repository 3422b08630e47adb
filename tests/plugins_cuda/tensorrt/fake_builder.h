// The builder that a plugin sees while shapes are inferred: expressions, constant or symbolic, that print themselves.
#pragma once

#include <NvInferRuntime.h>

#include <deque>
#include <map>
#include <string>
#include <vector>

namespace fake {

using nvinfer1::DimensionOperation;
using nvinfer1::IDimensionExpr;

struct Expr : IDimensionExpr {
    struct Impl final : nvinfer1::apiv::VDimensionExpr {
        bool constant;
        int64_t value;
        std::string text;
        bool isConstant() const override { return constant; }
        int64_t getConstantValue() const override { return value; }
        bool isSizeTensor() const override { return false; }
    } impl;
    Expr(bool constant, int64_t value, std::string text) {
        impl.constant = constant;
        impl.value = value;
        impl.text = std::move(text);
        mImpl = &impl;
    }
};

/// Owns every expression of a test; a deque, so that their addresses stay valid.
struct Builder : nvinfer1::IExprBuilder {
    struct Impl final : nvinfer1::apiv::VExprBuilder {
        std::deque<Expr> pool;
        std::map<std::string, const Expr*> symbols;

        const IDimensionExpr* constant(int64_t value) override {
            return &pool.emplace_back(true, value, std::to_string(value));
        }
        const IDimensionExpr* operation(DimensionOperation op, const IDimensionExpr& left,
                                        const IDimensionExpr& right) override {
            static constexpr const char* kSigns[] = {"+", "*", " max ", " min ", "-", "==", "<", " div ", " ceildiv "};
            const std::string sign = kSigns[static_cast<int>(op)];
            return &pool.emplace_back(false, 0, "(" + text(left) + sign + text(right) + ")");
        }
        const IDimensionExpr* declareSizeTensor(int32_t, const IDimensionExpr&, const IDimensionExpr& upper) override {
            return &upper;
        }
        static std::string text(const IDimensionExpr& expr) { return static_cast<const Expr&>(expr).impl.text; }
    } impl;
    Builder() { mImpl = &impl; }

    /// A size whose value is not known: the same expression for the same name.
    const IDimensionExpr* symbol(const std::string& name) {
        const Expr*& known = impl.symbols[name];
        if (known == nullptr) known = &impl.pool.emplace_back(false, 0, name);
        return known;
    }

    /// "B 4 16": numbers are constants, everything else is a symbol.
    nvinfer1::DimsExprs shape(const std::string& text) {
        nvinfer1::DimsExprs shape{};
        for (const std::string& word : words(text)) {
            const bool number = word.find_first_not_of("0123456789") == std::string::npos;
            shape.d[shape.nbDims++] = number ? impl.constant(std::stoll(word)) : symbol(word);
        }
        return shape;
    }

    static std::string text(const nvinfer1::DimsExprs& shape) {
        std::string text;
        for (int32_t i = 0; i < shape.nbDims; ++i) text += (i ? " " : "") + Impl::text(*shape.d[i]);
        return text;
    }

    static std::vector<std::string> words(const std::string& text) {
        std::vector<std::string> words;
        for (size_t from = 0; from < text.size();) {
            const size_t to = std::min(text.find(' ', from), text.size());
            words.push_back(text.substr(from, to - from));
            from = to + 1;
        }
        return words;
    }
};

}  // namespace fake
