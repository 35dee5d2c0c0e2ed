//! Configuration of `ringfence serve`: a TOML file, parsed strictly.
//!
//! Every option has a default, so an empty file or a missing one is a valid configuration. The parser
//! refuses unknown keys, values out of range and contradictions, and names the place in the file
//! ([`ConfigError`]). The file `dist/ringfence.toml` documents each option. A test checks that its values
//! are the defaults.
//!
//! The daemon can read the file again at any time. [`Config::changes_to`] compares the result with the
//! configuration in effect, and says for each change when it takes effect ([`Effect`]).

mod changes;
mod disks;
mod effects;
mod error;
mod file;
mod values;

#[cfg(test)]
mod tests;

pub use changes::Changes;
pub use disks::{DiskOverride, DiskSettings, Disks};
pub use effects::Effect;
pub use error::ConfigError;
pub use file::{Config, DeviceSettings, Limits, Metrics, Network, Override, PATH_DEFAULT, Serve};
pub use values::{Attach, Listen, LogLevel};
