//! System-call filters that a command gets between fork and exec (seccomp(2)).
//!
//! The kernel accepts a filter from a process with `CAP_SYS_ADMIN` in its user namespace, or with "no new privileges". The
//! starting process has the capability; the started one may lose it by `execve`. So the filter is installed in the
//! child, and the starting process stays without one.

// #syscall none: before the command of a guest, which has no list of this project's

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Instruction of classic BPF, with the layout of the kernel's `struct sock_filter`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instruction {
    /// Operation.
    pub code: u16,
    /// Instructions to skip if a comparison holds.
    pub jt: u8,
    /// Instructions to skip if a comparison does not hold.
    pub jf: u8,
    /// Operand.
    pub k: u32,
}

// The kernel reads an array of them.
const _: () = assert!(size_of::<Instruction>() == size_of::<libc::sock_filter>());

/// Largest number of instructions that the kernel accepts (`BPF_MAXINSNS`).
pub const INSTRUCTIONS_MAX: usize = 4096;

/// Puts filters in force for a command, in this order, before it executes its program. With `no_new_privileges` neither
/// the command nor its descendants gain rights by set-user-id bits or file capabilities.
///
/// The command fails to start if the kernel refuses a filter. Call this after everything else that runs before the
/// program: a filter may deny what that needs.
pub fn filter_before_exec(
    command: &mut Command,
    filters: Vec<Vec<Instruction>>,
    no_new_privileges: bool,
) {
    if filters.is_empty() && !no_new_privileges {
        return;
    }
    let before_exec = move || {
        if no_new_privileges {
            rustix::thread::set_no_new_privs(true)?;
        }
        filters.iter().try_for_each(|filter| install(filter))
    };
    // SAFETY: the closure makes system calls only. It allocates nothing, takes no lock and touches no state of other
    // threads, so a child of a process with several threads may run it.
    unsafe { command.pre_exec(before_exec) };
}

/// Puts a filter in force for the calling thread and what it starts.
fn install(filter: &[Instruction]) -> io::Result<()> {
    // The length was bounded by whoever built the filter; the kernel refuses 0 and more than its limit.
    let len = u16::try_from(filter.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: the structure is plain data, and the kernel only reads the array behind the pointer.
    let program = libc::sock_fprog { len, filter: filter.as_ptr().cast_mut().cast() };
    // Without this flag, kernels before 5.16 slow down the command (speculative store bypass), as for no container.
    let flags = libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW;
    // SAFETY: `program` points to `len` instructions of the kernel's layout, which live until the call returns.
    let done = unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program)
    };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers of a filter, as `linux/seccomp.h` has them.
    const ALLOW: u32 = 0x7fff_0000;
    const ERRNO: u32 = 0x0005_0000;

    fn ret(answer: u32) -> Instruction {
        Instruction { code: 0x06, jt: 0, jf: 0, k: answer }
    }

    #[test]
    fn filter_holds_for_command_and_not_for_its_parent() {
        // Load the number of the call; `kill` fails with EXDEV.
        let load = Instruction { code: 0x20, jt: 0, jf: 0, k: 0 };
        let number = u32::try_from(libc::SYS_kill).unwrap();
        let compare = Instruction { code: 0x15, jt: 0, jf: 1, k: number };
        let exdev = ERRNO | libc::EXDEV.cast_unsigned();
        let filter = vec![load, compare, ret(exdev), ret(ALLOW)];
        let mut command = Command::new("sh");
        command.args([
            "-c",
            "LC_ALL=C kill -0 $$ 2>&1; grep -E 'NoNewPrivs|^Seccomp:' /proc/self/status",
        ]);
        filter_before_exec(&mut command, vec![filter], true);
        let said = String::from_utf8(command.output().unwrap().stdout).unwrap();
        assert!(said.contains("cross-device link") || said.contains("Invalid cross"), "{said}");
        assert!(said.contains("NoNewPrivs:\t1") && said.contains("Seccomp:\t2"), "{said}");
        assert!(rustix::process::test_kill_process(rustix::process::getpid()).is_ok());
    }

    #[test]
    fn malformed_filter_keeps_command_from_starting() {
        for filter in [vec![], vec![ret(ALLOW); INSTRUCTIONS_MAX + 1]] {
            let mut command = Command::new("true");
            filter_before_exec(&mut command, vec![filter], true);
            assert_eq!(command.status().unwrap_err().raw_os_error(), Some(libc::EINVAL));
        }
    }
}
