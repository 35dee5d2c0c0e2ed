//! Options for the command's system-call filter, and the view of `--strict`.

use std::io;
use std::path::{Path, PathBuf};

use clap::Args;
use ringfence_guest::config::StrictView;
use ringfence_sandbox::command_filter::families::Allowed;
use ringfence_sandbox::command_filter::{CallList, FilterOptions};

use super::view::ViewOptions;

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

/// Directories that `--strict` replaces by empty ones, besides the home directory. The whole tree is read-only under
/// `--strict`; what has a writable replacement of its own leaves this list.
const EMPTY: [&str; 4] = ["/tmp", "/var/tmp", "/run", "/dev/shm"];

/// Returns the view of `--strict`: the one place that decides what it hides.
pub(super) fn strict_view(options: &ViewOptions) -> io::Result<StrictView> {
    let absolute = |path: &PathBuf| std::path::absolute(path);
    let homes: Vec<PathBuf> = homes().into_iter().filter(|home| home != Path::new("/")).collect();
    let directory = std::env::current_dir()?;
    // A working directory that contains the home directory would show it.
    let is_shown = !homes.iter().any(|home| home.starts_with(&directory));
    let mut shown: Vec<(PathBuf, bool)> = vec![];
    for path in &options.read_only {
        shown.push((absolute(path)?, false));
    }
    for path in &options.writable {
        shown.push((absolute(path)?, true));
    }
    shown.extend(is_shown.then_some((directory, true)));
    let empty = EMPTY.iter().map(PathBuf::from).chain(homes).collect();
    Ok(StrictView { empty, shown })
}

/// Returns the home directories of the user: that of the environment, and that of `/etc/passwd`.
fn homes() -> Vec<PathBuf> {
    let own = rustix::process::geteuid().as_raw().to_string();
    let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    let listed = users.lines().filter_map(|line| {
        // name:password:uid:gid:comment:home:shell (passwd(5))
        let mut columns = line.split(':');
        (columns.nth(2)? == own).then(|| columns.nth(2).map(PathBuf::from))?
    });
    let homes = std::env::var_os("HOME").map(PathBuf::from).into_iter().chain(listed);
    let mut homes: Vec<PathBuf> = homes
        .filter(|home| home.is_absolute())
        .filter_map(|home| home.canonicalize().ok())
        .collect();
    homes.sort();
    homes.dedup();
    homes
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

    #[test]
    fn strict_view_shows_options_and_working_directory() {
        let options = ViewOptions {
            read_only: vec!["/a".into()],
            writable: vec!["b".into()],
            ..ViewOptions::default()
        };
        let directory = std::env::current_dir().unwrap();
        let view = strict_view(&options).unwrap();
        assert_eq!(view.shown[..2], [("/a".into(), false), (directory.join("b"), true)]);
        assert!(view.empty.contains(&"/tmp".into()) && !view.empty.contains(&"/".into()));
    }
}
