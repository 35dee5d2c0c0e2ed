//! Namespaces for tests with a real kernel: [`ringfence_sys::testing`] for tests of one namespace.

pub(crate) use ringfence_sys::testing::ip;
use ringfence_sys::testing::{role, start};

/// Runs `test`, the body of the test `name`, in namespaces of its own.
pub(crate) fn in_namespaces(name: &str, test: impl FnOnce()) {
    if role().is_some() { test() } else { start(name) }
}
