// KvcDenseAttention: append one token, attend to every entry; the cache is read in place.
#include "operators/all.h"
#include "operators/step.h"

namespace kvc {
namespace {

class DenseAttentionKernel : public Kernel {
public:
    void compute(Call& call) const override {
        const Step step(call);
        DenseAttention attention(step);
        const int64_t parts = attention.parts();
        // A row needs a few hundred bytes: less work than waking a thread costs.
        for (int64_t row = 0; row < step.rows(); ++row) step.append(row);
        call.parallel(static_cast<size_t>(step.rows() * parts), [&](size_t task) {
            attention.attend(static_cast<int64_t>(task) / parts, static_cast<int64_t>(task) % parts);
        });
        call.parallel(static_cast<size_t>(step.rows()),
                      [&](size_t row) { attention.merge(static_cast<int64_t>(row)); });
    }
};

}  // namespace

const Implementation kDenseAttentionImplementation{
    schemas::kKvcDenseAttention,
    [](const Attributes&) -> std::unique_ptr<Kernel> { return std::make_unique<DenseAttentionKernel>(); }};

}  // namespace kvc
