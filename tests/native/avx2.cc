// Hides from a process what its CPU has beyond AVX2: libraries then take the kernels that they take
// on such a CPU. ONNX Runtime has no switch for that.
//
// Preloaded, it makes the instruction CPUID trap, which Linux on x86-64 can do where the CPU has
// "cpuid_fault" in /proc/cpuinfo (Intel, since 2012), and answers in its place. Threads and forked
// processes inherit the trap, and started ones the preloading.

#include <asm/prctl.h>
#include <cpuid.h>
#include <dlfcn.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace {

using Sigaction = int (*)(int, const struct sigaction*, struct sigaction*);

// What the process itself does about SIGSEGV, such as Python's faulthandler.
struct sigaction others = {};

Sigaction real_sigaction() {
  static const auto found = reinterpret_cast<Sigaction>(dlsym(RTLD_NEXT, "sigaction"));
  return found;
}

long let_cpuid_run(bool allowed) { return syscall(SYS_arch_prctl, ARCH_SET_CPUID, allowed); }

struct Registers {
  unsigned eax, ebx, ecx, edx;
};

Registers limited_cpuid(unsigned leaf, unsigned subleaf) {
  Registers is = {};
  let_cpuid_run(true);
  __cpuid_count(leaf, subleaf, is.eax, is.ebx, is.ecx, is.edx);
  let_cpuid_run(false);
  if (leaf == 7 && subleaf == 0) {
    // AVX-512 in its parts, GFNI, VAES, VPCLMULQDQ; AMX.
    is.ebx &= ~(1U << 16 | 1U << 17 | 1U << 21 | 1U << 28 | 1U << 30 | 1U << 31);
    is.ecx &= ~(1U << 1 | 1U << 6 | 1U << 8 | 1U << 9 | 1U << 10 | 1U << 11 | 1U << 12 | 1U << 14);
    is.edx &= ~(1U << 2 | 1U << 3 | 1U << 8 | 1U << 22 | 1U << 23 | 1U << 24 | 1U << 25);
  }
  if (leaf == 7 && subleaf == 1) {
    // AVX-VNNI, AVX512-BF16, AMX-FP16, AVX-IFMA; AVX-VNNI-INT8, AVX-NE-CONVERT, AVX-VNNI-INT16.
    is.eax &= ~(1U << 4 | 1U << 5 | 1U << 21 | 1U << 23);
    is.edx &= ~(1U << 4 | 1U << 5 | 1U << 10 | 1U << 19);
  }
  return is;
}

void hand_on(int signal, siginfo_t* info, void* context) {
  if (others.sa_flags & SA_SIGINFO) {
    others.sa_sigaction(signal, info, context);
  } else if (others.sa_handler != SIG_DFL && others.sa_handler != SIG_IGN) {
    others.sa_handler(signal);
  } else {
    struct sigaction ending = {};
    ending.sa_handler = SIG_DFL;
    real_sigaction()(signal, &ending, nullptr);
    raise(signal);
  }
}

void on_fault(int signal, siginfo_t* info, void* context) {
  greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  const auto* instruction = reinterpret_cast<const uint8_t*>(registers[REG_RIP]);
  // A trapped instruction is a general protection fault, which the kernel itself sends.
  if (info->si_code != SI_KERNEL || instruction[0] != 0x0F || instruction[1] != 0xA2) {
    hand_on(signal, info, context);
    return;
  }
  const Registers is = limited_cpuid(static_cast<unsigned>(registers[REG_RAX]),
                                     static_cast<unsigned>(registers[REG_RCX]));
  registers[REG_RAX] = is.eax;
  registers[REG_RBX] = is.ebx;
  registers[REG_RCX] = is.ecx;
  registers[REG_RDX] = is.edx;
  registers[REG_RIP] += 2;
}

__attribute__((constructor)) void limit() {
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  real_sigaction()(SIGSEGV, &action, &others);
  if (let_cpuid_run(false) != 0) {
    std::perror("this machine cannot hide what its CPU has (cpuid_fault)");
    std::_Exit(77);
  }
}

}  // namespace

extern "C" int sigaction(int signal, const struct sigaction* action, struct sigaction* old) {
  if (signal != SIGSEGV) return real_sigaction()(signal, action, old);
  if (old != nullptr) *old = others;
  if (action != nullptr) others = *action;
  return 0;
}

// As g++ does, whose -march=native asks for CPUID.
extern "C" sighandler_t signal(int signal, sighandler_t handler) {
  struct sigaction action = {};
  struct sigaction old = {};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;
  return sigaction(signal, &action, &old) == 0 ? old.sa_handler : SIG_ERR;
}
