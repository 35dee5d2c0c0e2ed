//! Options of `run` that limit a guest's processes.

use clap::Args;
use ringfence_sandbox::cgroup::{CpuLimit, Limits, MemoryLimit, PidsLimit};

/// Heading in the help of `run` and its manual page.
const HEADING: &str = "Limits";

/// Limits of a guest's processes.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct LimitArgs {
    /// Most memory of the guest's processes, such as 512m or 1.5g; the same of swap besides [default: no limit]
    ///
    /// Units are b (bytes), k, m, g and t (powers of 1024), as with Podman. The kernel kills a process of the guest that
    /// needs more. The limit counts init, the command and all that it starts, not the memory of Ringfence's other
    /// processes. It needs a cgroup that the user may divide: `systemd-run --user --scope -p Delegate=yes ringfence run …`
    /// starts one.
    #[arg(short, long, value_name = "SIZE", help_heading = HEADING)]
    pub memory: Option<MemoryLimit>,

    /// Most processor time of the guest's processes, in processors, such as 1.5 [default: no limit]
    #[arg(long, value_name = "N", help_heading = HEADING)]
    pub cpus: Option<CpuLimit>,

    /// Most processes and threads of the guest, init's two among them; -1 is no limit [default: no limit]
    #[arg(long, visible_alias = "pids-limit", value_name = "N", allow_hyphen_values = true,
          help_heading = HEADING)]
    pub pids: Option<PidsLimit>,
}

impl From<LimitArgs> for Limits {
    fn from(arguments: LimitArgs) -> Limits {
        Limits {
            memory: arguments.memory.and_then(|limit| limit.0),
            cpus: arguments.cpus.and_then(|limit| limit.0),
            pids: arguments.pids.and_then(|limit| limit.0),
        }
    }
}
