//! Sibling user namespaces: isolation between processes of one user.

use std::ffi::CString;

use ringfence_sys::namespaces::{Fresh, unshare};

use crate::not_allowed_here;
use crate::peer::{Line, Peer, errno_if};

/// Word that the victim stores in its private memory.
const SECRET: u64 = 0x5EC2_E75E_C2E7_5EC2;

/// Enters new namespaces, reports the result, stores the secret and waits.
fn victim(line: &Line) {
    let mut secret = Box::new(0u64);
    let entered = unshare(Fresh::UserAndPid).is_ok();
    // Written after the fork, so no other process has it.
    // SAFETY: the box is ours; volatile, so that it is really in memory.
    unsafe { core::ptr::write_volatile(&raw mut *secret, SECRET) };
    line.send(u64::from(entered));
    line.send((&raw const *secret).addr() as u64);
    line.receive();
}

/// Reads a word of another process's memory. Returns 0 on success, or the error number.
fn read_memory(pid: libc::pid_t, address: u64) -> u64 {
    let mut word = 0u64;
    let local = libc::iovec { iov_base: (&raw mut word).cast(), iov_len: 8 };
    let there = core::ptr::without_provenance_mut(usize::try_from(address).unwrap_or(0));
    let remote = libc::iovec { iov_base: there, iov_len: 8 };
    // SAFETY: the kernel writes at most the eight bytes of `word`.
    let read = unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) };
    errno_if(read != 8 || word != SECRET)
}

fn write_memory(pid: libc::pid_t, address: u64) -> u64 {
    let mut word = 0u64;
    let local = libc::iovec { iov_base: (&raw mut word).cast(), iov_len: 8 };
    let there = core::ptr::without_provenance_mut(usize::try_from(address).unwrap_or(0));
    let remote = libc::iovec { iov_base: there, iov_len: 8 };
    // SAFETY: the kernel only reads `word`; the memory written is the other process's.
    let wrote =
        unsafe { libc::process_vm_writev(pid, &raw const local, 1, &raw const remote, 1, 0) };
    errno_if(wrote != 8)
}

fn trace(pid: libc::pid_t) -> u64 {
    let none = core::ptr::null_mut::<libc::c_void>();
    // SAFETY: asks to trace another process; nothing of ours is touched.
    let seized = unsafe { libc::ptrace(libc::PTRACE_SEIZE, pid, none, none) };
    errno_if(seized != 0)
}

fn open_memory(path: &CString) -> u64 {
    // SAFETY: the path is a C string.
    let fd = unsafe { libc::open(path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC) };
    errno_if(fd < 0)
}

/// Copies a descriptor of another process.
fn take_descriptor(pid: libc::pid_t) -> u64 {
    // SAFETY: two calls that take numbers and give descriptors, which end with this child.
    unsafe {
        let process = libc::syscall(libc::SYS_pidfd_open, pid, 0);
        if process < 0 {
            return errno_if(true);
        }
        errno_if(libc::syscall(libc::SYS_pidfd_getfd, process, 0, 0) < 0)
    }
}

/// Assumption: a process in its own user namespace can neither read, write nor trace a process of the
/// same user in a sibling namespace, nor copy its descriptors. A parent namespace can; therefore the
/// process that starts guests is not the one that serves them.
#[test]
fn access_to_process_in_sibling_namespace_is_refused() {
    let victim = Peer::fork(victim);
    if victim.receive() == 0 {
        return not_allowed_here("user namespaces are refused: allow them (user_namespaces(7))");
    }
    let (pid, address) = (victim.pid, victim.receive());
    let path = CString::new(format!("/proc/{pid}/mem")).unwrap();
    let sibling = Peer::fork(|line| {
        line.send(u64::from(unshare(Fresh::UserAndPid).is_ok()));
        line.send(read_memory(pid, address));
        line.send(write_memory(pid, address));
        line.send(open_memory(&path));
        line.send(take_descriptor(pid));
        line.send(trace(pid));
    });
    assert_eq!(sibling.receive(), 1, "the second child's namespace");
    let (refused, hidden) = (u64::from(libc::EPERM as u32), u64::from(libc::EACCES as u32));
    assert_eq!(sibling.receive(), refused, "process_vm_readv");
    assert_eq!(sibling.receive(), refused, "process_vm_writev");
    assert_eq!(sibling.receive(), hidden, "/proc/PID/mem");
    assert_eq!(sibling.receive(), refused, "pidfd_getfd");
    assert_eq!(sibling.receive(), refused, "ptrace");
    assert_eq!(
        read_memory(pid, address),
        0,
        "the parent namespace can, which is why it is not used"
    );
    victim.send(1);
}
