//! Options for the command's system-call filter, and the view of `--strict`.

use std::path::{Path, PathBuf};

use clap::Args;
use ringfence_sandbox::command_filter::families::Allowed;
use ringfence_sandbox::command_filter::{CallList, FilterOptions};

/// Heading of the options in the help.
const HEADING: &str = "Isolation";
/// Value of `--seccomp` for no list.
const NO_LIST: &str = "none";

/// Arguments of the command's system-call filter.
#[derive(Debug, Args)]
pub struct FilterArgs {
    /// Run code that you do not trust: the command sees the working directory and the system's programs, and little else
    ///
    /// The file tree is read-only. The home directory, /tmp, /var/tmp, /run and /dev/shm are empty directories in memory.
    /// The working directory, and what --rw and --ro name, stay visible in them; the working directory and what --rw names
    /// are writable. If the working directory is the home directory or contains it, only --rw and --ro show parts of it.
    /// The command gains no rights by set-user-id programs, and makes no namespaces and mounts: browsers need
    /// their --no-sandbox, and no container, bubblewrap or other `ringfence run` starts in it.
    #[arg(long, conflicts_with_all = ["as_root", "share_runtime"], help_heading = HEADING)]
    pub strict: bool,

    /// List of the system calls that the command may make: a file in the form of Podman, Docker and the OCI, or `none`
    /// [default: a list of Ringfence's own]
    ///
    /// The default list denies calls that name what no namespace separates: keyrings, io_uring, performance events, BPF,
    /// userfaultfd, file handles, modules, the clock and the log of the kernel, and typing into a terminal (TIOCSTI). With
    /// `none` only --allow-family and --strict limit the calls. A file of the name `none` is ./none.
    #[arg(long, value_name = "FILE|none", help_heading = HEADING)]
    pub seccomp: Option<PathBuf>,

    /// Socket family that the command may use besides Unix, IPv4, IPv6, packet and netlink sockets; may be given several
    /// times
    ///
    /// Others belong to no network namespace, or to devices: `vsock` reaches the hypervisor and virtual machines, whatever
    /// --uplink and --allow say. Examples: `vsock`, `alg`, `can`, `bluetooth`, `xdp`. `netlink` allows all protocols of
    /// netlink. `all` allows every family, and what hides one: socketcall of 32-bit programs, and io_uring if the list
    /// of --seccomp has it.
    #[arg(long = "allow-family", value_name = "NAME", help_heading = HEADING)]
    pub families: Vec<Allowed>,
}

impl FilterArgs {
    /// Converts the arguments to the options of the filter.
    pub(crate) fn into_options(self) -> FilterOptions {
        FilterOptions {
            list: self.seccomp.map_or(CallList::Default, chosen_list),
            families: self.families,
            strict: self.strict,
        }
    }
}

fn chosen_list(path: PathBuf) -> CallList {
    if path == Path::new(NO_LIST) { CallList::None } else { CallList::File(path) }
}

/// Returns a description of the filter for `ringfence ps --json` and `status`.
pub(super) fn describe(options: &FilterOptions) -> String {
    let list = match &options.list {
        CallList::Default => "default".to_owned(),
        CallList::File(path) => path.display().to_string(),
        CallList::None => NO_LIST.to_owned(),
    };
    let strict = options.strict.then(|| "strict".to_owned());
    let families = (!options.families.is_empty()).then(|| {
        let names: Vec<String> = options.families.iter().map(ToString::to_string).collect();
        format!("families {}", names.join(" "))
    });
    [Some(list), strict, families].into_iter().flatten().collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn description_has_list_and_exceptions() {
        let options = |list, families: &[&str], strict| FilterOptions {
            list,
            families: families.iter().map(|name| name.parse().unwrap()).collect(),
            strict,
        };
        assert_eq!(describe(&options(CallList::Default, &[], false)), "default");
        let file = CallList::File("/etc/list.json".into());
        let text = describe(&options(file, &["vsock", "AF_ALG"], true));
        assert_eq!(text, "/etc/list.json, strict, families vsock alg");
        assert_eq!(chosen_list("none".into()), CallList::None);
        assert_eq!(chosen_list("./none".into()), CallList::File("./none".into()));
    }
}
