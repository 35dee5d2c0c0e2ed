//! Signals to eventfds of peers, which never block.
//!
//! A write to an eventfd whose counter is full blocks unless the open file has `O_NONBLOCK`. A peer that sent the
//! descriptor can fill the counter and clear the flag at any time, and `pwritev2` with `RWF_NOWAIT` does not support
//! eventfds. So an [`EventSignal`] lets the kernel add to the counter: it submits a read of 0 bytes from an empty file with
//! the eventfd as its notification (`IOCB_FLAG_RESFD`). The read is complete when the call returns. The kernel adds 1 to
//! the counter, up to its maximum, and wakes the readers.
//!
//! A signal is one system call, as a write is. The results of the reads stay in the context; one more call removes them
//! when the context is full, after `SIGNALS_PER_REMOVAL` signals at the earliest.

// #syscall uplink,disk,card,shield io_setup,io_destroy: interrupts of a virtual machine that cannot block
// #syscall uplink,disk,card,shield io_submit: interrupts of a virtual machine; reads and writes of files that are open
// #syscall uplink,disk,card,shield io_getevents: results of these interrupts

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::MemfdFlags;
use rustix::io::Errno;

/// Number of signals after which their results are removed, at the earliest.
const SIGNALS_PER_REMOVAL: libc::c_long = 64;
const IOCB_CMD_PREAD: u16 = 0;
const IOCB_FLAG_RESFD: u32 = 1;

/// Context of the kernel's asynchronous I/O, which signals eventfds.
#[derive(Debug)]
pub struct EventSignal {
    context: libc::c_ulong,
    /// Empty file that is read.
    file: OwnedFd,
}

/// Request of the kernel (`struct iocb` of `linux/aio_abi.h`), on a machine of either byte order.
#[repr(C)]
#[derive(Default)]
struct Request {
    data: u64,
    /// `aio_key` and `aio_rw_flags`, both 0.
    key_and_flags: u64,
    opcode: u16,
    priority: i16,
    file: u32,
    buffer: u64,
    len: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    event: u32,
}

/// Result of a request (`struct io_event`).
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Outcome {
    _fields: [u64; 4],
}

impl EventSignal {
    /// Creates a context.
    ///
    /// # Errors
    ///
    /// Returns `EAGAIN` if the system has too many (`fs.aio-max-nr`), and `ENOSYS` if the kernel lacks asynchronous I/O.
    pub fn new() -> Result<EventSignal, Errno> {
        let file = rustix::fs::memfd_create("signals", MemfdFlags::CLOEXEC)?;
        let mut context: libc::c_ulong = 0;
        // SAFETY: the call writes one `aio_context_t`, which is an unsigned long, to the address. It must be 0 before.
        let result =
            unsafe { libc::syscall(libc::SYS_io_setup, SIGNALS_PER_REMOVAL, &raw mut context) };
        check(result)?;
        Ok(EventSignal { context, file })
    }

    /// Adds 1 to the counter of an eventfd, unless it is full. Wakes its readers in both cases. Never blocks.
    ///
    /// # Errors
    ///
    /// Returns `EINVAL` if the descriptor is no eventfd.
    pub fn signal(&self, event: impl AsFd) -> Result<(), Errno> {
        let number = |fd: i32| u32::try_from(fd).map_err(|_| Errno::BADF);
        let mut request = Request {
            opcode: IOCB_CMD_PREAD,
            file: number(self.file.as_raw_fd())?,
            flags: IOCB_FLAG_RESFD,
            event: number(event.as_fd().as_raw_fd())?,
            ..Request::default()
        };
        match self.submit(&mut request) {
            Err(Errno::AGAIN) => {
                self.remove_results()?;
                self.submit(&mut request)
            }
            other => other,
        }
    }

    fn submit(&self, request: &mut Request) -> Result<(), Errno> {
        let requests = [&raw mut *request];
        let one: libc::c_long = 1;
        // SAFETY: the call reads one pointer and the request behind it, which has the layout of `struct iocb`, is borrowed
        // for the call alone and outlives it. The kernel writes its key there. The read has 0 bytes, so it writes to no
        // buffer.
        let result =
            unsafe { libc::syscall(libc::SYS_io_submit, self.context, one, requests.as_ptr()) };
        check(result)
    }

    fn remove_results(&self) -> Result<(), Errno> {
        let mut results = [Outcome::default(); 64];
        let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        loop {
            let (least, most): (libc::c_long, libc::c_long) = (0, 64);
            // SAFETY: the call writes at most 64 results, each of 32 bytes, to the array, and reads the time limit.
            let result = unsafe {
                libc::syscall(
                    libc::SYS_io_getevents,
                    self.context,
                    least,
                    most,
                    results.as_mut_ptr(),
                    &raw const now,
                )
            };
            check(result)?;
            if result < most {
                return Ok(());
            }
        }
    }
}

impl Drop for EventSignal {
    fn drop(&mut self) {
        // SAFETY: the context is this value's own, and no request uses memory of the process.
        let _ = unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

fn check(result: libc::c_long) -> Result<(), Errno> {
    match result {
        ..0 => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    fn counter(event: &OwnedFd) -> u64 {
        let mut bytes = [0; 8];
        rustix::io::read(event, &mut bytes).unwrap();
        u64::from_ne_bytes(bytes)
    }

    #[test]
    fn each_signal_adds_one_beyond_the_capacity_of_the_context() {
        let (signal, event) =
            (EventSignal::new().unwrap(), eventfd(0, EventfdFlags::empty()).unwrap());
        for _ in 0..100_000 {
            signal.signal(&event).unwrap();
        }
        assert_eq!(counter(&event), 100_000);
    }

    #[test]
    fn full_eventfd_that_blocks_does_not_block_a_signal() {
        let (signal, event) =
            (EventSignal::new().unwrap(), eventfd(0, EventfdFlags::empty()).unwrap());
        rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        for _ in 0..10 {
            signal.signal(&event).unwrap();
        }
        assert!(counter(&event) >= u64::MAX - 1);
    }

    #[test]
    fn file_of_another_kind_is_refused() {
        let signal = EventSignal::new().unwrap();
        let (_read, write) = rustix::pipe::pipe().unwrap();
        assert_eq!(signal.signal(&write), Err(Errno::INVAL));
    }
}
