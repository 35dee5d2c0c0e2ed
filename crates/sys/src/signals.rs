//! Signal masks of threads, and signals as a readable descriptor (signalfd(2)).
//!
//! A [`SignalSet`] is a plain number. The calls translate it to and from the C library's own type.

// #syscall none: masks are set before a sandbox closes, or in processes that have none

use core::mem::MaybeUninit;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;
use rustix::process::Signal;

/// Set of signals: bit n-1 for signal n, as in `/proc/PID/status`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SignalSet(u64);

impl SignalSet {
    pub const ALL: SignalSet = SignalSet(u64::MAX);

    /// Returns the set with the given bits.
    pub fn from_bits(bits: u64) -> SignalSet {
        SignalSet(bits)
    }

    /// Returns `true` if the signal is in the set.
    pub fn contains(self, number: i32) -> bool {
        bit(number).is_some_and(|bit| self.0 & bit != 0)
    }

    /// Returns the numbers of the signals in the set.
    pub fn numbers(self) -> impl Iterator<Item = i32> {
        (1..=64).filter(move |&number| self.contains(number))
    }

    fn to_native(self) -> libc::sigset_t {
        let mut native = MaybeUninit::uninit();
        // SAFETY: sigemptyset initialises the set, and sigaddset changes an initialised one. A number that
        // the C library keeps for itself is refused by sigaddset and stays out.
        unsafe {
            libc::sigemptyset(native.as_mut_ptr());
            for number in self.numbers() {
                libc::sigaddset(native.as_mut_ptr(), number);
            }
            native.assume_init()
        }
    }

    fn from_native(native: &libc::sigset_t) -> SignalSet {
        // SAFETY: sigismember reads the live set; an unknown number answers -1.
        let is_in = |number: &i32| unsafe { libc::sigismember(native, *number) } == 1;
        (1..=64).filter(is_in).collect()
    }
}

impl FromIterator<i32> for SignalSet {
    fn from_iter<I: IntoIterator<Item = i32>>(numbers: I) -> SignalSet {
        SignalSet(numbers.into_iter().filter_map(bit).fold(0, |bits, bit| bits | bit))
    }
}

impl FromIterator<Signal> for SignalSet {
    fn from_iter<I: IntoIterator<Item = Signal>>(signals: I) -> SignalSet {
        signals.into_iter().map(Signal::as_raw).collect()
    }
}

fn bit(number: i32) -> Option<u64> {
    1u64.checked_shl(u32::try_from(number.checked_sub(1)?).ok()?)
}

/// Returns the signals that the calling thread blocks.
///
/// # Errors
///
/// Returns the kernel's error; none is expected.
pub fn mask() -> io::Result<SignalSet> {
    change_mask(libc::SIG_BLOCK, SignalSet::default())
}

/// Adds signals to those that the calling thread blocks. New threads and child processes inherit the mask.
///
/// # Errors
///
/// Returns the kernel's error; none is expected.
pub fn block(set: SignalSet) -> io::Result<()> {
    change_mask(libc::SIG_BLOCK, set).map(drop)
}

/// Makes the calling thread block exactly the signals of `set`. Returns those that it blocked before.
///
/// # Errors
///
/// Returns the kernel's error; none is expected.
pub fn replace_mask(set: SignalSet) -> io::Result<SignalSet> {
    change_mask(libc::SIG_SETMASK, set)
}

fn change_mask(how: libc::c_int, set: SignalSet) -> io::Result<SignalSet> {
    let wanted = set.to_native();
    let mut before = SignalSet::default().to_native();
    // SAFETY: both sets are live and initialised. A blocked signal stays pending; no handler runs.
    match unsafe { libc::pthread_sigmask(how, &raw const wanted, &raw mut before) } {
        0 => Ok(SignalSet::from_native(&before)),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// Returns `true` if a signal of this number has been sent to this process and waits because it is blocked.
///
/// # Errors
///
/// Returns the kernel's error; none is expected.
pub fn is_pending(number: i32) -> io::Result<bool> {
    let mut pending = SignalSet::default().to_native();
    // SAFETY: the set is live and initialised; the call writes it.
    match unsafe { libc::sigpending(&raw mut pending) } {
        0 => Ok(SignalSet::from_native(&pending).contains(number)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Gives a signal its default disposition. A process that ignores `SIGCHLD` learns of no child's end.
///
/// # Errors
///
/// Returns the kernel's error for a number that is no signal.
pub fn restore_default(number: i32) -> io::Result<()> {
    // SAFETY: no handler is installed.
    let before = unsafe { libc::signal(number, libc::SIG_DFL) };
    if before == libc::SIG_ERR { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Ignores `SIGXFSZ`, so that a write beyond the limit of the size of files (`RLIMIT_FSIZE`) fails with `EFBIG` and the
/// process goes on.
pub fn ignore_file_size_signal() {
    // SAFETY: no handler is installed. The call cannot fail for this signal.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// Set if this program was started with `SIGPIPE` ignored.
static PIPE_WAS_IGNORED: AtomicBool = AtomicBool::new(false);

/// Functions that the C library calls before `main`. The standard library ignores `SIGPIPE` in `main`, so that its
/// disposition at the start must be read here.
#[used]
// SAFETY: the section holds addresses of functions that take no argument they need.
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = record_pipe;

extern "C" fn record_pipe() {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: the call writes the action, and changes nothing. All-zero bytes are a valid action.
    let action = unsafe {
        libc::sigaction(libc::SIGPIPE, std::ptr::null(), action.as_mut_ptr());
        action.assume_init()
    };
    PIPE_WAS_IGNORED.store(action.sa_sigaction == libc::SIG_IGN, Ordering::Relaxed);
}

/// Returns `true` if this program was started with `SIGPIPE` ignored.
pub fn pipe_was_ignored() -> bool {
    PIPE_WAS_IGNORED.load(Ordering::Relaxed)
}

/// Opens a non-blocking descriptor from which pending signals of `set` are read. Block them first.
///
/// # Errors
///
/// Returns the kernel's error, for example if no descriptor is free.
pub fn open(set: SignalSet) -> io::Result<OwnedFd> {
    let native = set.to_native();
    // SAFETY: the kernel reads the live set; -1 asks for a new descriptor.
    let fd =
        unsafe { libc::signalfd(-1, &raw const native, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just returned this descriptor to this call alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Signal that was pending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PendingSignal {
    pub number: i32,
    /// Reason (`SI_*` of sigaction(2)): 0 or less if a process sent the signal.
    pub code: i32,
}

/// Takes a pending signal from a descriptor of [`open`], if there is one.
///
/// # Errors
///
/// Returns the kernel's error; none is expected.
pub fn read(descriptor: &OwnedFd) -> io::Result<Option<PendingSignal>> {
    // `struct signalfd_siginfo` begins with the number, an error number and the code.
    let mut info = [0; 128];
    match rustix::io::read(descriptor, &mut info) {
        Ok(_) => {}
        Err(Errno::AGAIN) => return Ok(None),
        Err(error) => return Err(error.into()),
    }
    let [a, b, c, d, _, _, _, _, e, f, g, h, ..] = info;
    let (number, code) = (i32::from_ne_bytes([a, b, c, d]), i32::from_ne_bytes([e, f, g, h]));
    Ok(Some(PendingSignal { number, code }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn set_of_numbers_out_of_range_is_empty() {
        let set: SignalSet = [0, -1, 65, i32::MIN, i32::MAX].into_iter().collect();
        assert_eq!(set, SignalSet::default());
        assert!(!SignalSet::ALL.contains(0) && !SignalSet::ALL.contains(65));
        assert!(SignalSet::ALL.contains(1) && SignalSet::ALL.contains(64));
    }

    #[test]
    fn mask_is_replaced_extended_and_restored() {
        // A thread of its own: masks belong to threads.
        std::thread::spawn(|| {
            let set: SignalSet = [Signal::USR1, Signal::WINCH].into_iter().collect();
            let before = replace_mask(set).unwrap();
            assert_eq!(mask().unwrap().numbers().collect::<Vec<_>>(), [10, 28]);
            block([Signal::TERM].into_iter().collect()).unwrap();
            assert_eq!(mask().unwrap().numbers().collect::<Vec<_>>(), [10, 15, 28]);
            replace_mask(before).unwrap();
            assert_eq!(mask().unwrap(), before);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn raised_signal_is_read_once_from_descriptor() {
        std::thread::spawn(|| {
            let set: SignalSet = [Signal::USR2].into_iter().collect();
            block(set).unwrap();
            let descriptor = open(set).unwrap();
            assert_eq!(read(&descriptor).unwrap(), None);
            // SAFETY: raise has no memory arguments. This thread blocks the signal, so no handler runs.
            assert_eq!(unsafe { libc::raise(libc::SIGUSR2) }, 0);
            let expected = PendingSignal { number: libc::SIGUSR2, code: libc::SI_TKILL };
            assert_eq!(read(&descriptor).unwrap(), Some(expected));
            assert_eq!(read(&descriptor).unwrap(), None);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn blocked_signal_is_pending_once_it_was_sent() {
        std::thread::spawn(|| {
            block([Signal::USR1].into_iter().collect()).unwrap();
            assert!(!is_pending(libc::SIGUSR1).unwrap());
            // SAFETY: raise has no memory arguments. This thread blocks the signal, so no handler runs.
            assert_eq!(unsafe { libc::raise(libc::SIGUSR1) }, 0);
            assert!(is_pending(libc::SIGUSR1).unwrap());
        })
        .join()
        .unwrap();
    }

    #[test]
    fn blocking_all_signals_omits_those_that_cannot_be_blocked() {
        std::thread::spawn(|| {
            block(SignalSet::ALL).unwrap();
            let blocked = mask().unwrap();
            assert!(blocked.contains(libc::SIGTERM) && blocked.contains(libc::SIGSEGV));
            assert!(!blocked.contains(libc::SIGKILL) && !blocked.contains(libc::SIGSTOP));
        })
        .join()
        .unwrap();
    }
}
