//! Filter for a command that shares its caller's terminal: it refuses to write to the terminal's input.
//!
//! `TIOCSTI` puts a byte into the input of a controlling terminal, as if it had been typed, and `TIOCLINUX` pastes a
//! selection on a virtual console. A shell would run such a line after the command. The filter compares the low 32 bits of
//! the request, as the kernel does, in every call convention of the processor.

// #syscall none: it is put in force on a guest's init, which has no list

use std::io;

use seccompiler::{BpfProgram, sock_filter};

/// Requests that are refused (asm-generic/ioctls.h, asm/termbits.h).
const REFUSED: [u32; 2] = [0x5412, 0x541c];

/// Architectures of `linux/audit.h` and their numbers of `ioctl`.
#[cfg(target_arch = "x86_64")]
const CONVENTIONS: [(u32, u32); 3] =
    [(0xc000_003e, 16), (0xc000_003e, 0x4000_0202), (0x4000_0003, 54)];
#[cfg(target_arch = "aarch64")]
const CONVENTIONS: [(u32, u32); 2] = [(0xc000_00b7, 29), (0x4000_0028, 54)];
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const CONVENTIONS: [(u32, u32); 0] = [];

/// Offsets in `struct seccomp_data`: the number of the call, the architecture, the low half of the second argument.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const REQUEST: u32 = if cfg!(target_endian = "little") { 24 } else { 28 };

/// Instructions of linux/bpf_common.h: load a word, jump if equal, return.
const LOAD: u16 = 0x20;
const JUMP_IF_EQUAL: u16 = 0x15;
const RETURN: u16 = 0x06;
/// Results of a filter (linux/seccomp.h).
const ALLOW: u32 = 0x7fff_0000;
const FAIL: u32 = 0x0005_0000;

/// Denies this process and all that it starts to write to the input of a terminal, with `EPERM`. They get no new
/// privileges either.
///
/// # Errors
///
/// Fails if the kernel has no seccomp filters, or the processor's call conventions are unknown.
pub fn deny_terminal_input() -> io::Result<()> {
    if CONVENTIONS.is_empty() {
        return Err(io::ErrorKind::Unsupported.into());
    }
    seccompiler::apply_filter(&program()).map_err(io::Error::other)
}

fn program() -> BpfProgram {
    let step = |code, jt, jf, k| sock_filter { code, jt, jf, k };
    let mut program = Vec::new();
    for (architecture, number) in CONVENTIONS {
        // Each block ends with a return, or goes on with the next block.
        let block = 2 + REFUSED.len() * 2;
        let block = u8::try_from(block).unwrap_or(u8::MAX);
        program.push(step(LOAD, 0, 0, ARCHITECTURE));
        program.push(step(JUMP_IF_EQUAL, 0, 2 + block, architecture));
        program.push(step(LOAD, 0, 0, NUMBER));
        program.push(step(JUMP_IF_EQUAL, 0, block, number));
        program.push(step(LOAD, 0, 0, REQUEST));
        for request in REFUSED {
            program.push(step(JUMP_IF_EQUAL, 0, 1, request));
            program.push(step(RETURN, 0, 0, FAIL | libc::EPERM.unsigned_abs()));
        }
        program.push(step(RETURN, 0, 0, ALLOW));
    }
    program.push(step(RETURN, 0, 0, ALLOW));
    program
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the program on a call, as the kernel would.
    fn result(architecture: u32, number: u32, request: u32) -> u32 {
        let (program, mut at, mut word) = (program(), 0, 0);
        loop {
            let step = &program[at];
            at += 1;
            match step.code {
                LOAD => {
                    word = match step.k {
                        NUMBER => number,
                        ARCHITECTURE => architecture,
                        _ => request,
                    }
                }
                JUMP_IF_EQUAL => at += usize::from(if word == step.k { step.jt } else { step.jf }),
                _ => return step.k,
            }
        }
    }

    #[test]
    fn request_is_refused_in_each_call_convention_and_no_other_call_is() {
        let refused = FAIL | libc::EPERM.unsigned_abs();
        for (architecture, number) in CONVENTIONS {
            for request in REFUSED {
                assert_eq!(result(architecture, number, request), refused);
            }
            // TCGETS, and another call with the same argument.
            assert_eq!(result(architecture, number, 0x5401), ALLOW);
            assert_eq!(result(architecture, number + 1, REFUSED[0]), ALLOW);
        }
        assert_eq!(result(0x1234, 16, REFUSED[0]), ALLOW);
    }
}
