//! Names by which other programs start the fronts, and their exit status.

/// Exit status of a failure, as pasta has it.
pub const STATUS_FAILED: u8 = 1;

/// Name of the front for network namespaces.
pub const PASTA: &str = "pasta";

/// Name of the front for virtual machines.
pub const PASST: &str = "passt";

/// Name of the command that serves the network card of a virtual machine.
pub const NET: &str = "vhost-user net";

/// Name of the command that stands between a virtual machine and a foreign backend.
pub const SHIELD: &str = "shield";
