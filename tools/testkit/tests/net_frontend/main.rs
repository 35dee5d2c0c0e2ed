//! Network frontends that break one rule at a time, beside a correct guest. No attack may stop the backend.
//! Each increments a counter of its own and costs at most the packet or the device that it concerns.
//! docs/advisories.md maps each advisory to its test.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

mod channels;
mod cycles;
mod flips;
mod grants;
mod keys;
mod packets;
mod rings;
mod storms;
mod windows;
