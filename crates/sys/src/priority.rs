//! Scheduling classes of threads (sched(7)).

// #syscall none: benchmarks, whose processes have no list

use std::io;

/// Moves the calling thread to the class `SCHED_IDLE`: it runs when no thread of another class wants its core.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn run_when_idle() -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: the kernel reads one sched_param, which outlives the call.
    let done = unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const parameters) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    #[test]
    fn thread_that_runs_when_idle_has_the_class_of_the_kernel() {
        std::thread::spawn(|| {
            super::run_when_idle().unwrap();
            let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
            // The policy is field 41; the name, field 2, may hold anything.
            let fields = stat.rsplit_once(')').unwrap().1;
            let policy = fields.split_whitespace().nth(38).unwrap();
            assert_eq!(policy, libc::SCHED_IDLE.to_string(), "{stat}");
        })
        .join()
        .unwrap();
    }
}
