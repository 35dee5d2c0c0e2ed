//! Peers that break the rules, attacks from inside a sandbox, and the conformance suite of platforms.
//!
//! * [`net`]: adversary frontends and backends of a vif, and the stage that a test gives them.
//! * [`block`]: the same of a vbd.
//! * [`attack`]: system calls that a process would try after an attacker took it over.
//! * [`denied`]: a loud end for a process whose sandbox denies a system call.
//! * [`conformance`]: the tests that every [`Platform`](ringfence_platform::Platform) passes.
//!
//! The tests in `tests/` are those that need one of these. No product crate depends on this one.

pub mod attack;
pub mod block;
pub mod conformance;
pub mod denied;
pub mod net;
