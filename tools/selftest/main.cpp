// The kernels without torch: every instruction set that was built and that this machine has, against double.
//
// Built and run by tools/selftest.py, with any compiler and for any machine.
#include <cstdio>

#include "check.h"

namespace selftest {
namespace {

#define SELFTEST_OF_DTYPES(isa, kernels)                                                         \
  {&multimax::isa::kernels##_f32, &multimax::isa::kernels##_f64, &multimax::isa::kernels##_bf16, \
   &multimax::isa::kernels##_f16}
#define SELFTEST_SET(isa, pairs)            \
  {#isa,                                    \
   SELFTEST_OF_DTYPES(isa, row_kernels),    \
   SELFTEST_OF_DTYPES(isa, loss_kernels),   \
   SELFTEST_OF_DTYPES(isa, entmax_kernels), \
   &multimax::isa::attention_kernels,       \
   pairs}

const Set sets[] = {
    SELFTEST_SET(baseline, false),
#if defined(__x86_64__)
    SELFTEST_SET(avx2, false),
    SELFTEST_SET(avx512, false),
    SELFTEST_SET(avx512_bf16, true),
#endif
};

bool machine_has([[maybe_unused]] const std::string& name) {
#if defined(__x86_64__)
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (name == "avx2") return avx2;
  if (name == "avx512") return avx512;
  if (name == "avx512_bf16") return avx512 && __builtin_cpu_supports("avx512bf16");
#endif
  return true;
}

}  // namespace
}  // namespace selftest

int main() {
  using namespace selftest;
  Report report;
  for (const Set& set : sets) {
    if (set.attention == nullptr) continue;
    if (!machine_has(set.name)) {
      std::printf("%s: built, but this machine cannot run it\n", set.name);
      continue;
    }
    test_rows(set, report);
    test_loss(set, report);
    test_entmax(set, report);
    test_attention(set, report);
  }
  std::printf("%lld numbers compared, %lld wrong\n", static_cast<long long>(report.all()),
              static_cast<long long>(report.failures()));
  return report.failures() == 0 && report.all() > 0 ? 0 : 1;
}
