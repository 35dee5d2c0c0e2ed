//! System-call filter of a guest's command: what the command may ask of the kernel that it shares with the host.
//!
//! Namespaces give a command its own files, processes and networks. The filter denies system calls that name what no
//! namespace separates. The launcher builds it ([`CommandFilter::new`]), init installs it in each command that it starts
//! ([`CommandFilter::hold`]), and never in itself:
//!
//! ```text
//! guard   families of sockets, io_uring; with --strict namespaces and mounts   ─┐ the kernel takes the strictest
//! list    the default list, that of a file in the OCI form, or none            ─┘ answer of both
//! ```
//!
//! A filter judges a call by the entry of the kernel that it takes: the numbers of x86-64, of 32-bit x86 and of x32. It
//! needs `CAP_SYS_ADMIN` in the user namespace of init, and so leaves set-user-id programs as they were. With
//! `--strict` the command gets "no new privileges" instead.
//!
//! * [`families`]: socket families. `list`: the default list. [`profile`]: lists of files.
//! * `numbers`: numbers of calls by name. `program`: translation to BPF.

// #syscall none: in the launcher before it trusts a peer, and in a guest's init

pub mod families;
mod list;
mod numbers;
pub mod profile;
mod program;

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::Command;

use ringfence_sys::seccomp::{self, Instruction};
use rustix::fs::MemfdFlags;

use families::Allowed;
use list::Denied;
use numbers::{Mode, NEWEST, X32_BIT};
use profile::{Profile, ProfileError};
use program::{Action, Rules, Table, TooLong};

/// Entry of the kernel: an architecture with the modes whose numbers it takes.
struct Entry {
    /// Number of the architecture (`AUDIT_ARCH_*` in `linux/audit.h`).
    architecture: u32,
    modes: &'static [Mode],
}

#[cfg(target_arch = "x86_64")]
const ENTRIES: &[Entry] = &[
    Entry { architecture: 0xc000_003e, modes: &[Mode::X86_64, Mode::X32] },
    Entry { architecture: 0x4000_0003, modes: &[Mode::X86] },
];
#[cfg(target_arch = "aarch64")]
const ENTRIES: &[Entry] = &[Entry { architecture: 0xc000_00b7, modes: &[Mode::Aarch64] }];
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const ENTRIES: &[Entry] = &[];

/// Answer to a call that the list does not know.
const NO_SUCH_CALL: Action = Action::Errno(38);
const _: () = assert!(libc::ENOSYS == 38);

/// List of the calls that a command may make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CallList {
    Default,
    /// List of a file in the form of Podman, Docker and the OCI.
    File(PathBuf),
    /// No list. The guard holds nevertheless.
    None,
}

/// Filter as the user chooses it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilterOptions {
    pub list: CallList,
    /// Socket families besides those that a command may always use.
    pub families: Vec<Allowed>,
    /// Denies namespaces, mounts and new privileges.
    pub strict: bool,
}

/// Errors of a filter that cannot be built.
#[derive(Debug, thiserror::Error)]
pub enum FilterError {
    #[error("--seccomp {}: {source}", path.display())]
    Profile { path: PathBuf, source: ProfileError },
    #[error("--seccomp: {0}")]
    TooLong(#[from] TooLong),
    #[error(
        "the numbers of this processor's system calls are not known: `--seccomp none --allow-family all` runs the \
         command without a filter"
    )]
    Processor,
}

/// Filter that can be put in force for a command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommandFilter {
    programs: Vec<Vec<Instruction>>,
    no_new_privileges: bool,
}

impl CommandFilter {
    /// Builds the filter. `has_capabilities`: the command is root of its user namespace, so that entries of a file hold
    /// that are for commands with a capability. Returns remarks on entries of a file that have no effect, too.
    ///
    /// # Errors
    ///
    /// Fails if the file is malformed, or the processor is unknown.
    pub fn new(
        options: &FilterOptions,
        has_capabilities: bool,
    ) -> Result<(CommandFilter, Vec<String>), FilterError> {
        let mut guard = families::rules(&options.families);
        if options.strict {
            guard.extend(list::strict());
        }
        let is_known = !ENTRIES.is_empty();
        if !is_known && (!guard.is_empty() || options.list != CallList::None) {
            return Err(FilterError::Processor);
        }
        let (mut programs, mut remarks) = (vec![], vec![]);
        match &options.list {
            CallList::Default => {
                // One program is enough. A call of both parts has the rules of the guard.
                let rules = of_denied(guard.into_iter().chain(list::default_list()), true);
                programs.push(program::translate(&rules)?);
            }
            CallList::None if guard.is_empty() => {}
            CallList::None => programs.push(program::translate(&of_denied(guard, false))?),
            CallList::File(path) => {
                let fail = |source| FilterError::Profile { path: path.clone(), source };
                let profile = Profile::read(path).map_err(fail)?;
                let (rules, remarks_of_file) =
                    profile.rules(ENTRIES, has_capabilities).map_err(fail)?;
                remarks = remarks_of_file;
                if !guard.is_empty() {
                    programs.push(program::translate(&of_denied(guard, false))?);
                }
                // Last: it may deny the installation of filters.
                programs.push(program::translate(&rules)?);
            }
        }
        Ok((CommandFilter { programs, no_new_privileges: options.strict }, remarks))
    }

    /// Puts the filter in force for a command when it executes its program. Call it after everything else that runs
    /// before the program.
    pub fn hold(&self, command: &mut Command) {
        seccomp::filter_before_exec(command, self.programs.clone(), self.no_new_privileges);
    }

    /// Writes the filter to a file in memory, for another process.
    ///
    /// # Errors
    ///
    /// Fails if there is no memory or no descriptor.
    pub fn to_file(&self) -> io::Result<OwnedFd> {
        let fd = rustix::fs::memfd_create("ringfence-filter", MemfdFlags::CLOEXEC)?;
        let mut file = File::from(fd);
        let mut bytes = vec![u8::from(self.no_new_privileges)];
        for program in &self.programs {
            let count = u16::try_from(program.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
            bytes.extend(count.to_le_bytes());
            for Instruction { code, jt, jf, k } in program {
                bytes.extend(code.to_le_bytes());
                bytes.extend([*jt, *jf]);
                bytes.extend(k.to_le_bytes());
            }
        }
        file.write_all(&bytes)?;
        file.rewind()?;
        Ok(file.into())
    }

    /// Reads the filter from a file of [`CommandFilter::to_file`].
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be read, or is not whole.
    pub fn from_file(fd: OwnedFd) -> io::Result<CommandFilter> {
        let mut bytes = vec![];
        File::from(fd).read_to_end(&mut bytes)?;
        CommandFilter::parse(&bytes).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    fn parse(bytes: &[u8]) -> Option<CommandFilter> {
        let (first, mut rest) = bytes.split_first()?;
        let mut programs = vec![];
        while let Some((count, after)) = rest.split_first_chunk::<2>() {
            let length = usize::from(u16::from_le_bytes(*count)) * size_of::<Instruction>();
            let (program, after) = after.split_at_checked(length)?;
            rest = after;
            let instruction = |bytes: &[u8]| {
                let (code, bytes) = bytes.split_first_chunk::<2>()?;
                let ([jt, jf], bytes) = bytes.split_first_chunk::<2>()?;
                let k = u32::from_le_bytes(bytes.try_into().ok()?);
                Some(Instruction { code: u16::from_le_bytes(*code), jt: *jt, jf: *jf, k })
            };
            let chunks = program.chunks_exact(size_of::<Instruction>());
            programs.push(chunks.map(instruction).collect::<Option<_>>()?);
        }
        let is_whole = rest.is_empty() && *first <= 1;
        is_whole.then_some(CommandFilter { programs, no_new_privileges: *first == 1 })
    }
}

/// Returns rules that deny calls and allow all others. `knows_all`: denies calls that the tables do not know, too.
fn of_denied(denied: impl IntoIterator<Item = Denied>, knows_all: bool) -> Rules {
    let mut tables: Vec<Table> = ENTRIES
        .iter()
        .map(|entry| {
            let mut otherwise =
                [(0, Action::Allow)].into_iter().collect::<std::collections::BTreeMap<_, _>>();
            if knows_all {
                otherwise.insert(NEWEST + 1, NO_SUCH_CALL);
            }
            if knows_all && entry.modes.contains(&Mode::X32) {
                otherwise.insert(X32_BIT, NO_SUCH_CALL);
            }
            Table { architecture: entry.architecture, otherwise, rules: Default::default() }
        })
        .collect();
    for Denied { call, rules } in denied {
        for (entry, table) in ENTRIES.iter().zip(&mut tables) {
            // A list that knows all calls denies those of x32 as a whole.
            let modes = entry.modes.iter().filter(|mode| !(knows_all && **mode == Mode::X32));
            let numbers = modes.filter_map(|mode| numbers::number(call, *mode));
            for number in numbers {
                table.rules.entry(number).or_insert_with(|| rules.clone());
            }
        }
    }
    Rules { tables, foreign: NO_SUCH_CALL }
}

/// Property of all filters, for fuzzing and for tests.
#[cfg(any(test, feature = "test-utils"))]
pub mod fuzzing {
    use super::profile;

    /// Parses arbitrary bytes as a list. A program of an accepted list decides as the list reads.
    pub fn profile_text(data: &[u8]) {
        profile::fuzzing::check(data);
    }
}

#[cfg(test)]
#[cfg(target_arch = "x86_64")]
mod tests {
    use super::program::testing::{Call, run};
    use super::*;

    const X86_64: u32 = 0xc000_003e;
    const X86: u32 = 0x4000_0003;

    fn options(families: &[&str], strict: bool, list: CallList) -> FilterOptions {
        let families = families.iter().map(|name| name.parse().unwrap()).collect();
        FilterOptions { list, families, strict }
    }

    fn built(options: &FilterOptions) -> CommandFilter {
        CommandFilter::new(options, false).unwrap().0
    }

    /// Returns the answer of all programs of a filter, as the kernel combines them: the strictest, which is the least
    /// with the sign that it has there.
    fn answer(filter: &CommandFilter, call: &Call) -> u32 {
        let answers = filter.programs.iter().map(|program| run(program, call).unwrap());
        answers.min_by_key(|answer| (answer & 0xffff_0000).cast_signed()).unwrap_or(ALLOW)
    }

    const ALLOW: u32 = 0x7fff_0000;

    fn error(number: i32) -> u32 {
        0x0005_0000 | number.cast_unsigned()
    }

    fn call(name: &str, mode: Mode, arguments: &[u64]) -> Call {
        let architecture = if mode == Mode::X86 { X86 } else { X86_64 };
        let number = numbers::number(name, mode).unwrap();
        let mut all = [0; 6];
        all[..arguments.len()].copy_from_slice(arguments);
        Call { architecture, number, arguments: all }
    }

    #[test]
    fn sockets_of_families_that_no_namespace_holds_are_denied_by_every_entry() {
        let unknown_family = error(libc::EAFNOSUPPORT);
        for (list, has_x32) in [(CallList::Default, false), (CallList::None, true)] {
            let filter = built(&options(&[], false, list));
            for mode in [Mode::X86_64, Mode::X32, Mode::X86] {
                let of = |expected: u32| {
                    let is_absent = mode == Mode::X32 && !has_x32;
                    if is_absent { error(libc::ENOSYS) } else { expected }
                };
                for name in ["socket", "socketpair"] {
                    let socket = |family, protocol| {
                        answer(&filter, &call(name, mode, &[family, 1, protocol]))
                    };
                    for family in 0..64 {
                        let is_held = [1, 2, 10, 16, 17].contains(&family);
                        let expected = of(if is_held { ALLOW } else { unknown_family });
                        assert_eq!(socket(family, 0), expected, "{family} {mode:?}");
                        // The kernel takes the low 32 bits.
                        assert_eq!(socket(family | 7 << 32, 0), expected, "{family} {mode:?}");
                    }
                    for (family, protocol) in [(16, 9), (16, 11), (16, 20), (2, 256), (10, 256)] {
                        assert_eq!(socket(family, protocol), of(error(libc::EPROTONOSUPPORT)));
                    }
                }
                let ring = call("io_uring_setup", mode, &[]);
                assert_eq!(answer(&filter, &ring), of(error(libc::EPERM)));
            }
            for (operation, expected) in [(1, unknown_family), (8, unknown_family), (3, ALLOW)] {
                let call = call("socketcall", Mode::X86, &[operation]);
                assert_eq!(answer(&filter, &call), expected);
            }
        }
    }

    #[test]
    fn families_are_allowed_one_by_one_or_all() {
        let socket = |families: &[&str], family, protocol| {
            let filter = built(&options(families, false, CallList::Default));
            answer(&filter, &call("socket", Mode::X86_64, &[family, 1, protocol]))
        };
        assert_eq!(socket(&["vsock"], 40, 0), ALLOW);
        assert_eq!(socket(&["vsock"], 38, 0), error(libc::EAFNOSUPPORT));
        assert_eq!(socket(&["alg", "netlink"], 16, 9), ALLOW);
        assert_eq!(socket(&["smc"], 2, 256), ALLOW);
        assert_eq!(socket(&["all"], 99, 0), ALLOW);
        let all = built(&options(&["all"], false, CallList::Default));
        assert_eq!(answer(&all, &call("socketcall", Mode::X86, &[1])), ALLOW);
        // The list still denies what the guard no longer does.
        assert_eq!(answer(&all, &call("io_uring_setup", Mode::X86_64, &[])), error(libc::EPERM));
        assert_eq!(built(&options(&["all"], false, CallList::None)), CommandFilter::default());
    }

    #[test]
    fn default_list_denies_objects_of_the_whole_kernel_and_allows_namespaces() {
        let filter = built(&options(&[], false, CallList::Default));
        for mode in [Mode::X86_64, Mode::X86] {
            let of = |name, arguments: &[u64]| answer(&filter, &call(name, mode, arguments));
            for name in ["keyctl", "add_key", "request_key"] {
                assert_eq!(of(name, &[]), error(libc::ENOSYS), "{name}");
            }
            for name in [
                "perf_event_open",
                "bpf",
                "userfaultfd",
                "open_by_handle_at",
                "kexec_load",
                "init_module",
                "finit_module",
                "delete_module",
                "settimeofday",
                "syslog",
                "swapon",
                "acct",
                "iopl",
            ] {
                assert_eq!(of(name, &[]), error(libc::EPERM), "{name}");
            }
            for name in [
                "read",
                "execve",
                "clone3",
                "unshare",
                "setns",
                "mount",
                "umount2",
                "pivot_root",
                "ptrace",
                "seccomp",
                "name_to_handle_at",
                "file_setattr",
                "personality",
                "memfd_secret",
            ] {
                assert_eq!(of(name, &[0x7e02_0080]), ALLOW, "{name}");
            }
            for (operation, expected) in
                [(0x5412, libc::EPERM), (0x541c, libc::EPERM), (0x5412 | 1 << 40, libc::EPERM)]
            {
                assert_eq!(of("ioctl", &[0, operation]), error(expected), "{operation:#x}");
            }
            assert_eq!(of("ioctl", &[0x5412, 0x5413]), ALLOW);
        }
        for (architecture, number) in [
            (X86_64, NEWEST + 1),
            (X86, NEWEST + 1),
            (X86_64, 0x3fff_ffff),
            (X86_64, X32_BIT),
            (X86_64, X32_BIT | 520),
            (0xc000_00b7, 0),
        ] {
            let call = Call { architecture, number, arguments: [0; 6] };
            assert_eq!(answer(&filter, &call), error(libc::ENOSYS), "{number:#x}");
        }
        // A tracer skips a call by this number.
        let skipped = Call { architecture: X86_64, number: u32::MAX, arguments: [0; 6] };
        assert_eq!(answer(&filter, &skipped), ALLOW);
    }

    #[test]
    fn strict_filter_denies_namespaces_and_mounts_with_any_list() {
        for list in [CallList::Default, CallList::None] {
            let filter = built(&options(&[], true, list));
            assert!(filter.no_new_privileges);
            for mode in [Mode::X86_64, Mode::X86] {
                let of = |name, arguments: &[u64]| answer(&filter, &call(name, mode, arguments));
                for bit in [17, 25, 26, 27, 28, 29, 30] {
                    assert_eq!(of("clone", &[1 << bit | 17]), error(libc::EPERM), "{bit}");
                    assert_eq!(of("unshare", &[1 << bit]), error(libc::EPERM), "{bit}");
                }
                assert_eq!(of("unshare", &[0x80]), error(libc::EPERM));
                // Threads, and descriptors of their own.
                assert_eq!(of("clone", &[0x003d_0f00]), ALLOW);
                assert_eq!(of("unshare", &[0x600]), ALLOW);
                assert_eq!(of("clone3", &[]), error(libc::ENOSYS));
                for name in ["mount", "umount2", "pivot_root", "setns", "open_tree", "move_mount"] {
                    assert_eq!(of(name, &[]), error(libc::EPERM), "{name}");
                }
            }
        }
    }

    #[test]
    fn every_name_of_the_lists_is_a_call() {
        for Denied { call, .. } in list::default_list().into_iter().chain(list::strict()) {
            assert!(numbers::is_known(call), "{call}");
        }
    }

    #[test]
    fn filter_survives_its_way_to_init_and_a_cut_one_is_refused() {
        let filter = built(&options(&[], true, CallList::Default));
        assert_eq!(CommandFilter::from_file(filter.to_file().unwrap()).unwrap(), filter);
        let none = CommandFilter::default();
        assert_eq!(CommandFilter::from_file(none.to_file().unwrap()).unwrap(), none);
        let mut bytes = vec![];
        File::from(filter.to_file().unwrap()).read_to_end(&mut bytes).unwrap();
        for length in [0, 2, bytes.len() - 1] {
            assert_eq!(CommandFilter::parse(&bytes[..length]), None, "{length}");
        }
        // The kernel evaluates it at its installation for each number of a call.
        assert!(bytes.len() < 8192, "{}", bytes.len());
    }
}
