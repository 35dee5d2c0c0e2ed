//! CPU cores that this process may use, and binding of threads to them.

use anyhow::Context;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Returns the cores that this process may use.
///
/// # Errors
///
/// Returns an error if the kernel does not tell them.
pub(super) fn allowed() -> anyhow::Result<Vec<usize>> {
    let allowed = sched_getaffinity(None).context("sched_getaffinity")?;
    Ok((0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).collect())
}

/// Returns two cores that this process may use, if there are two.
///
/// # Errors
///
/// Returns an error if the kernel does not tell them.
pub(super) fn pair() -> anyhow::Result<Option<[usize; 2]>> {
    Ok(allowed()?.first_chunk::<2>().copied())
}

/// Binds the calling thread to one core.
///
/// # Errors
///
/// Returns an error if the process may not use the core.
pub(super) fn bind(core: usize) -> anyhow::Result<()> {
    let mut cores = CpuSet::new();
    cores.set(core);
    sched_setaffinity(None, &cores).with_context(|| format!("binding a thread to core {core}"))
}
