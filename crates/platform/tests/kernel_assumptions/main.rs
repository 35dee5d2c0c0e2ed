//! Kernel behaviour on which the local platform relies, and hazards that its design avoids.
//!
//! Each test names its subject: an assumption that must hold, or a hazard that it demonstrates. A failure
//! is no fault of the project's code: this kernel does not give a guarantee that `docs/local-platform.md`
//! relies on. A test prints `SKIPPED` and the reason if the kernel lacks the feature under test.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

mod events;
mod memory;
mod peer;
mod pins;
mod punching;
mod seals;
mod siblings;

/// Reports a test as skipped because the kernel lacks the feature, which then cannot be installed either.
fn not_in_this_kernel(reason: impl std::fmt::Display) {
    eprintln!("SKIPPED: {reason}");
}

/// Reports a test as skipped because this user may not use the feature. Root could permit it, so the
/// function panics if `RINGFENCE_TEST_REQUIRE` is 1.
fn not_allowed_here(reason: impl std::fmt::Display) {
    assert!(std::env::var_os("RINGFENCE_TEST_REQUIRE").is_none_or(|v| v != "1"), "{reason}");
    eprintln!("SKIPPED: {reason}");
}
