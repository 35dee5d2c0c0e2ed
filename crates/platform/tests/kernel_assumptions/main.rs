//! What the local platform assumes of Linux, each assumption a test that says which it is, and the
//! hazards that its design avoids, each shown to be one.
//!
//! A failure here is no fault of the code: it says that this kernel does not give what the
//! promises in `docs/local-platform.md` rest on. Where a kernel lacks what a hazard needs, the test
//! says `SKIPPED` and why.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

mod events;
mod memory;
mod peer;
mod pins;
mod punching;
mod seals;
mod siblings;

/// The kernel does not have it: there is nothing to assume, and nothing to install.
fn not_in_this_kernel(reason: impl std::fmt::Display) {
    eprintln!("SKIPPED: {reason}");
}

/// It is there, and not allowed here: root could change that, so where everything is to be tested
/// this is a failure.
fn not_allowed_here(reason: impl std::fmt::Display) {
    assert!(std::env::var_os("RINGFENCE_TEST_REQUIRE").is_none_or(|v| v != "1"), "{reason}");
    eprintln!("SKIPPED: {reason}");
}
