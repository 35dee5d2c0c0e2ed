//! Test kit: adversary peers, attacks from inside a sandbox, and the conformance suite of platforms.
//!
//! * [`net`]: adversary frontends and backends of a vif, with a driver domain to test them against.
//! * [`block`]: the same for a vbd.
//! * [`attack`]: system calls that an attacker would try in a process under its control.
//! * [`denied`]: a message and exit for a process whose sandbox denies a system call.
//! * [`conformance`]: the tests that every [`Platform`](ringfence_platform::Platform) has to pass.
//! * [`hostile`]: adversary guests by behaviour, for the benchmark of hostile neighbours.
//! * [`agents`]: the processes that scenarios on Xen drive.
//! * [`subcommands`]: search for subcommands without a test.
//!
//! The tests in `tests/` need one of these modules. No product crate depends on this crate.

pub mod agents;
pub mod attack;
pub mod block;
pub mod conformance;
pub mod denied;
pub mod hostile;
pub mod net;
pub mod subcommands;
