//! Lists of system calls in the JSON form of the OCI, as Podman and Docker take them.
//!
//! Two forms exist. Runtimes take that of the specification (`linux.seccomp` of
//! <https://github.com/opencontainers/runtime-spec>): actions, architectures, calls with conditions on their arguments.
//! Files of Podman and Docker add `archMap`, `includes`, `excludes`, `errno` and `defaultErrno`, which the engine
//! evaluates. `Profile` reads both, strictly: an unknown field, action, call, capability or architecture is an error
//! with its line.
//!
//! The meaning is that of runc with libseccomp:
//!
//! * An entry with the default action has no effect.
//! * All conditions of an entry must hold. If two of them are about one argument, each is an entry by itself.
//! * An entry without conditions wins over those with conditions for the same call, and the first of several over the
//!   others: the list of Podman has such. Among entries with conditions the strictest wins.
//! * A call by an entry of the kernel that `architectures` or `archMap` does not list ends the process. The processor's own
//!   is always listed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use rustix::io::Errno;
use serde::Deserialize;

use super::Entry;
use super::numbers::{self, Mode, X32_BIT};
use super::program::{Action, Condition, Relation, Rule, Rules, Table};

/// Maximum length of a file in bytes.
const FILE_MAX: u64 = 1 << 20;

/// Errors of a list.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    #[error("{0}")]
    Read(#[from] io::Error),
    #[error("it is longer than {FILE_MAX} bytes")]
    TooLong,
    #[error("{0}")]
    Json(#[from] serde_json::Error),
    /// A value that is valid by itself contradicts another one or is unknown.
    #[error("line {line}: {what}")]
    Value { line: usize, what: String },
}

/// List of a file.
#[derive(Debug)]
pub(super) struct Profile {
    text: String,
    content: Content,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Content {
    default_action: ActionName,
    default_errno_ret: Option<u16>,
    default_errno: Option<String>,
    architectures: Option<Vec<Architecture>>,
    arch_map: Option<Vec<ArchitectureMap>>,
    flags: Option<Vec<Flag>>,
    listener_path: Option<String>,
    listener_metadata: Option<String>,
    syscalls: Option<Vec<Call>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct ArchitectureMap {
    architecture: Architecture,
    sub_architectures: Option<Vec<Architecture>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Call {
    name: Option<String>,
    names: Option<Vec<String>>,
    action: ActionName,
    errno_ret: Option<u16>,
    errno: Option<String>,
    args: Option<Vec<Argument>>,
    #[serde(rename = "comment")]
    _comment: Option<String>,
    includes: Option<Filter>,
    excludes: Option<Filter>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Filter {
    caps: Option<Vec<String>>,
    arches: Option<Vec<String>>,
    min_kernel: Option<String>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Argument {
    index: u8,
    value: u64,
    #[serde(default)]
    value_two: u64,
    op: Operator,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
enum ActionName {
    #[serde(rename = "SCMP_ACT_KILL", alias = "SCMP_ACT_KILL_THREAD")]
    KillThread,
    #[serde(rename = "SCMP_ACT_KILL_PROCESS")]
    KillProcess,
    #[serde(rename = "SCMP_ACT_TRAP")]
    Trap,
    #[serde(rename = "SCMP_ACT_ERRNO")]
    Errno,
    #[serde(rename = "SCMP_ACT_TRACE")]
    Trace,
    #[serde(rename = "SCMP_ACT_LOG")]
    Log,
    #[serde(rename = "SCMP_ACT_ALLOW")]
    Allow,
    #[serde(rename = "SCMP_ACT_NOTIFY")]
    Notify,
}

#[derive(Clone, Copy, Debug, Deserialize)]
enum Operator {
    #[serde(rename = "SCMP_CMP_EQ")]
    Equal,
    #[serde(rename = "SCMP_CMP_NE")]
    NotEqual,
    #[serde(rename = "SCMP_CMP_LT")]
    Less,
    #[serde(rename = "SCMP_CMP_LE")]
    LessOrEqual,
    #[serde(rename = "SCMP_CMP_GT")]
    Greater,
    #[serde(rename = "SCMP_CMP_GE")]
    GreaterOrEqual,
    #[serde(rename = "SCMP_CMP_MASKED_EQ")]
    MaskedEqual,
}

/// Flags of seccomp(2). The filter is on one thread, and the speed of speculation is left alone in any case.
#[derive(Clone, Copy, Debug, Deserialize)]
enum Flag {
    #[serde(rename = "SECCOMP_FILTER_FLAG_TSYNC", alias = "SECCOMP_FILTER_FLAG_SPEC_ALLOW")]
    WithoutEffect,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
enum Architecture {
    #[serde(rename = "SCMP_ARCH_X86_64")]
    X86_64,
    #[serde(rename = "SCMP_ARCH_X32")]
    X32,
    #[serde(rename = "SCMP_ARCH_X86")]
    X86,
    #[serde(rename = "SCMP_ARCH_AARCH64")]
    Aarch64,
    /// Known, and never the processor of this program.
    #[serde(
        rename = "SCMP_ARCH_ARM",
        alias = "SCMP_ARCH_LOONGARCH64",
        alias = "SCMP_ARCH_M68K",
        alias = "SCMP_ARCH_MIPS",
        alias = "SCMP_ARCH_MIPS64",
        alias = "SCMP_ARCH_MIPS64N32",
        alias = "SCMP_ARCH_MIPSEL",
        alias = "SCMP_ARCH_MIPSEL64",
        alias = "SCMP_ARCH_MIPSEL64N32",
        alias = "SCMP_ARCH_PARISC",
        alias = "SCMP_ARCH_PARISC64",
        alias = "SCMP_ARCH_PPC",
        alias = "SCMP_ARCH_PPC64",
        alias = "SCMP_ARCH_PPC64LE",
        alias = "SCMP_ARCH_RISCV64",
        alias = "SCMP_ARCH_S390",
        alias = "SCMP_ARCH_S390X",
        alias = "SCMP_ARCH_SH",
        alias = "SCMP_ARCH_SHEB"
    )]
    Other,
}

impl Architecture {
    fn mode(self) -> Option<Mode> {
        match self {
            Architecture::X86_64 => Some(Mode::X86_64),
            Architecture::X32 => Some(Mode::X32),
            Architecture::X86 => Some(Mode::X86),
            Architecture::Aarch64 => Some(Mode::Aarch64),
            Architecture::Other => None,
        }
    }
}

/// Mode of 64-bit programs of this processor.
const NATIVE: Mode = if cfg!(target_arch = "aarch64") { Mode::Aarch64 } else { Mode::X86_64 };
/// Names of processors in `includes` and `excludes`; the first is this one's.
#[rustfmt::skip]
const PROCESSORS: [&str; 18] = {
    let own = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    [
        own, "amd64", "arm", "arm64", "loong64", "mips", "mips64", "mips64n32", "mipsel", "mipsel64",
        "mipsel64n32", "ppc", "ppc64", "ppc64le", "riscv64", "s390", "s390x", "x32",
    ]
};

/// Capabilities of Linux, without their prefix `CAP_`.
#[rustfmt::skip]
const CAPABILITIES: [&str; 41] = [
    "AUDIT_CONTROL", "AUDIT_READ", "AUDIT_WRITE", "BLOCK_SUSPEND", "BPF", "CHECKPOINT_RESTORE", "CHOWN",
    "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "IPC_LOCK", "IPC_OWNER", "KILL", "LEASE",
    "LINUX_IMMUTABLE", "MAC_ADMIN", "MAC_OVERRIDE", "MKNOD", "NET_ADMIN", "NET_BIND_SERVICE", "NET_BROADCAST",
    "NET_RAW", "PERFMON", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYSLOG", "SYS_ADMIN", "SYS_BOOT",
    "SYS_CHROOT", "SYS_MODULE", "SYS_NICE", "SYS_PACCT", "SYS_PTRACE", "SYS_RAWIO", "SYS_RESOURCE", "SYS_TIME",
    "SYS_TTY_CONFIG", "WAKE_ALARM",
];

/// Errors by name, as far as lists use them.
const ERRNOS: [(&str, Errno); 19] = [
    ("E2BIG", Errno::TOOBIG),
    ("EACCES", Errno::ACCESS),
    ("EAFNOSUPPORT", Errno::AFNOSUPPORT),
    ("EAGAIN", Errno::AGAIN),
    ("EBADF", Errno::BADF),
    ("EBUSY", Errno::BUSY),
    ("EEXIST", Errno::EXIST),
    ("EFAULT", Errno::FAULT),
    ("EINVAL", Errno::INVAL),
    ("EIO", Errno::IO),
    ("ENODEV", Errno::NODEV),
    ("ENOENT", Errno::NOENT),
    ("ENOMEM", Errno::NOMEM),
    ("ENOSYS", Errno::NOSYS),
    ("ENOTSUP", Errno::OPNOTSUPP),
    ("EOPNOTSUPP", Errno::OPNOTSUPP),
    ("EPERM", Errno::PERM),
    ("EPROTONOSUPPORT", Errno::PROTONOSUPPORT),
    ("ESRCH", Errno::SRCH),
];
/// Largest number of an error.
const ERRNO_MAX: u16 = 4095;

/// Properties of the command and the computer by which entries are chosen.
struct Surroundings {
    has_capabilities: bool,
    /// Major and minor version of the kernel.
    kernel: (u32, u32),
}

/// Entry for one call, evaluated.
#[derive(Clone, Debug)]
struct Chosen<'a> {
    name: &'a str,
    rule: Rule,
}

impl Profile {
    /// Reads and parses a file.
    pub(super) fn read(path: &Path) -> Result<Profile, ProfileError> {
        let mut text = String::new();
        File::open(path)?.take(FILE_MAX + 1).read_to_string(&mut text)?;
        if u64::try_from(text.len()).is_ok_and(|length| length > FILE_MAX) {
            return Err(ProfileError::TooLong);
        }
        Profile::parse(text)
    }

    fn parse(text: String) -> Result<Profile, ProfileError> {
        let content: Content = serde_json::from_str(&text)?;
        Ok(Profile { text, content })
    }

    /// Evaluates the list for a command on this computer. Returns remarks on names that have no effect, too.
    pub(super) fn rules(
        &self,
        entries: &[Entry],
        has_capabilities: bool,
    ) -> Result<(Rules, Vec<String>), ProfileError> {
        let release = rustix::system::uname().release().to_string_lossy().into_owned();
        let kernel = version(&release).unwrap_or((0, 0));
        self.rules_in(entries, &Surroundings { has_capabilities, kernel })
    }

    fn rules_in(
        &self,
        entries: &[Entry],
        surroundings: &Surroundings,
    ) -> Result<(Rules, Vec<String>), ProfileError> {
        let Content { default_action, default_errno_ret, default_errno, .. } = &self.content;
        let default = self.action(*default_action, *default_errno_ret, default_errno.as_deref())?;
        if self.content.listener_path.is_some() || self.content.listener_metadata.is_some() {
            return Err(self
                .error("listenerPath", "`listenerPath` needs a supervisor, which `run` has not"));
        }
        // All flags that are parsed have no effect.
        let _: &Option<Vec<Flag>> = &self.content.flags;
        let modes = self.modes()?;
        let mut chosen = vec![];
        for call in self.content.syscalls.iter().flatten() {
            chosen.extend(self.choose(call, surroundings)?);
        }
        chosen.retain(|Chosen { rule, .. }| rule.action != default);
        let remarks = self.unknown_names(&chosen, default)?;
        self.check_start(&chosen, default)?;
        let table = |entry| Profile::table(entry, &modes, &chosen, default);
        let tables = entries.iter().map(table).collect();
        Ok((Rules { tables, foreign: Action::KillProcess }, remarks))
    }

    /// Returns the modes whose calls the list judges.
    fn modes(&self) -> Result<Vec<Mode>, ProfileError> {
        let (list, map) = (&self.content.architectures, &self.content.arch_map);
        let is_listed = list.as_ref().is_some_and(|list| !list.is_empty());
        if is_listed && map.as_ref().is_some_and(|map| !map.is_empty()) {
            let what = "`architectures` and `archMap` are both given: leave one out";
            return Err(self.error("archMap", what));
        }
        let own = map.iter().flatten().find(|map| map.architecture.mode() == Some(NATIVE));
        let subordinate = own.and_then(|map| map.sub_architectures.as_ref()).into_iter().flatten();
        let listed = list.iter().flatten().chain(subordinate).filter_map(|it| it.mode());
        Ok([NATIVE].into_iter().chain(listed).collect())
    }

    /// Evaluates one entry, which may be for other commands.
    fn choose<'a>(
        &'a self,
        call: &'a Call,
        surroundings: &Surroundings,
    ) -> Result<Vec<Chosen<'a>>, ProfileError> {
        let names: Vec<&str> = match (&call.name, &call.names) {
            (Some(name), Some(names)) if !names.is_empty() => {
                return Err(
                    self.error(name, format!("`{name}`: `name` and `names` are both given"))
                );
            }
            (Some(name), _) => vec![name],
            (None, names) => names.iter().flatten().map(String::as_str).collect(),
        };
        let first = names.first().copied().unwrap_or("syscalls");
        let action = self.action(call.action, call.errno_ret, call.errno.as_deref())?;
        let mut conditions = vec![];
        for argument in call.args.iter().flatten() {
            conditions.push(self.condition(first, argument)?);
        }
        let none = Filter::default();
        let is_meant = self.includes(call.includes.as_ref().unwrap_or(&none), surroundings)?
            & !self.excludes(call.excludes.as_ref().unwrap_or(&none), surroundings)?;
        if !is_meant {
            return Ok(vec![]);
        }
        let arguments: BTreeSet<u8> = conditions.iter().map(|c| c.argument).collect();
        let rules: Vec<Rule> = if arguments.len() == conditions.len() {
            vec![Rule { when: conditions, action }]
        } else {
            conditions.iter().map(|condition| Rule { when: vec![*condition], action }).collect()
        };
        let of_name = |name| rules.iter().map(move |rule| Chosen { name, rule: rule.clone() });
        Ok(names.into_iter().flat_map(of_name).collect())
    }

    fn action(
        &self,
        name: ActionName,
        number: Option<u16>,
        errno: Option<&str>,
    ) -> Result<Action, ProfileError> {
        let of_name = match errno.filter(|name| !name.is_empty()) {
            None => None,
            Some(name) => {
                let known = ERRNOS.iter().find(|(known, _)| *known == name);
                let unknown = || self.error(name, format!("`{name}` is no error that lists use"));
                let (_, errno) = known.ok_or_else(unknown)?;
                Some(super::families::errno(errno.raw_os_error()))
            }
        };
        let number = match (of_name, number) {
            (Some(named), Some(number)) if named != number => {
                let name = errno.unwrap_or_default();
                let what = format!("`{name}` is the number {named}, and `errnoRet` says {number}");
                return Err(self.error(name, what));
            }
            (named, number) => named.or(number),
        };
        if let Some(number) = number.filter(|number| *number > ERRNO_MAX) {
            let what = format!("{number} is no error: they end at {ERRNO_MAX}");
            return Err(self.error_at(&number.to_string(), what));
        }
        let or_default = number.unwrap_or(super::families::errno(libc::EPERM));
        Ok(match name {
            ActionName::KillThread => Action::KillThread,
            ActionName::KillProcess => Action::KillProcess,
            ActionName::Trap => Action::Trap(0),
            ActionName::Errno => Action::Errno(or_default),
            ActionName::Trace => Action::Trace(or_default),
            ActionName::Log => Action::Log,
            ActionName::Allow => Action::Allow,
            ActionName::Notify => {
                let what = "`SCMP_ACT_NOTIFY` needs a supervisor, which `run` has not";
                return Err(self.error("SCMP_ACT_NOTIFY", what));
            }
        })
    }

    fn condition(&self, call: &str, argument: &Argument) -> Result<Condition, ProfileError> {
        let Argument { index, value, value_two, op } = *argument;
        if index > 5 {
            let what = format!("`{call}`: argument {index}; they are numbered from 0 to 5");
            return Err(self.error(call, what));
        }
        let relation = match op {
            Operator::Equal => Relation::Equal,
            Operator::NotEqual => Relation::NotEqual,
            Operator::Less => Relation::Less,
            Operator::LessOrEqual => Relation::LessOrEqual,
            Operator::Greater => Relation::Greater,
            Operator::GreaterOrEqual => Relation::GreaterOrEqual,
            Operator::MaskedEqual => Relation::MaskedEqual(value),
        };
        let value = if matches!(op, Operator::MaskedEqual) { value_two } else { value };
        Ok(Condition { argument: index, relation, value })
    }

    /// Returns `true` if all conditions of `includes` hold.
    fn includes(&self, filter: &Filter, now: &Surroundings) -> Result<bool, ProfileError> {
        let [caps, arches, kernel] = self.parts(filter, now)?;
        Ok(caps.unwrap_or(true) && arches.unwrap_or(true) && kernel.unwrap_or(true))
    }

    /// Returns `true` if one condition of `excludes` holds.
    fn excludes(&self, filter: &Filter, now: &Surroundings) -> Result<bool, ProfileError> {
        let [caps, arches, kernel] = self.parts(filter, now)?;
        Ok(caps.unwrap_or(false) || arches.unwrap_or(false) || kernel.unwrap_or(false))
    }

    /// Returns whether capabilities, processor and kernel are those of a filter; `None` for a part that it lacks.
    fn parts(
        &self,
        filter: &Filter,
        now: &Surroundings,
    ) -> Result<[Option<bool>; 3], ProfileError> {
        let Filter { caps, arches, min_kernel } = filter;
        let caps = caps.as_deref().filter(|caps| !caps.is_empty());
        for name in caps.into_iter().flatten() {
            if !name.strip_prefix("CAP_").is_some_and(|rest| CAPABILITIES.contains(&rest)) {
                return Err(self.error(name, format!("`{name}` is no capability")));
            }
        }
        let arches = arches.as_deref().filter(|arches| !arches.is_empty());
        for name in arches.into_iter().flatten() {
            if !PROCESSORS.contains(&name.as_str()) && name != "x86" {
                return Err(self.error(name, format!("`{name}` is no processor")));
            }
        }
        let kernel = min_kernel.as_deref().filter(|text| !text.is_empty());
        let kernel = kernel.map(|text| {
            let least = version(text);
            least.ok_or_else(|| self.error(text, format!("`{text}` is no version of a kernel")))
        });
        Ok([
            caps.map(|_| now.has_capabilities),
            arches.map(|names| names.iter().any(|name| name == PROCESSORS[0])),
            kernel.transpose()?.map(|least| now.kernel >= least),
        ])
    }

    /// Returns remarks on unknown names. A name whose entry makes the list stricter must be known.
    fn unknown_names(
        &self,
        chosen: &[Chosen<'_>],
        default: Action,
    ) -> Result<Vec<String>, ProfileError> {
        let mut left_out = BTreeSet::new();
        for Chosen { name, rule } in chosen.iter().filter(|it| !numbers::is_known(it.name)) {
            if rule.action.strictness() <= default.strictness() {
                let what = format!("`{name}` is no system call that this version knows");
                return Err(self.error(name, what));
            }
            left_out.insert(*name);
        }
        let remark = |name| {
            format!(
                "--seccomp: `{name}` is no system call that this version knows: it is not allowed"
            )
        };
        Ok(left_out.into_iter().map(remark).collect())
    }

    /// Fails if the list denies the call that starts the command, whatever its arguments.
    fn check_start(&self, chosen: &[Chosen<'_>], default: Action) -> Result<(), ProfileError> {
        const START: &str = "execve";
        let may_start = |action| matches!(action, Action::Allow | Action::Log | Action::Trace(_));
        let mut of_start = chosen.iter().filter(|it| it.name == START).map(|it| &it.rule);
        let free = of_start.clone().find(|rule| rule.when.is_empty());
        let starts = match free {
            Some(rule) => may_start(rule.action),
            None => may_start(default) || of_start.any(|rule| may_start(rule.action)),
        };
        let what = "it denies `execve`, without which no command starts";
        if starts { Ok(()) } else { Err(self.error(START, what)) }
    }

    /// Returns the rules of one architecture.
    fn table(entry: &Entry, modes: &[Mode], chosen: &[Chosen<'_>], default: Action) -> Table {
        let of_mode = |mode| if modes.contains(&mode) { default } else { Action::KillProcess };
        let mut otherwise = BTreeMap::new();
        let mut rules: BTreeMap<u32, Vec<Rule>> = BTreeMap::new();
        for mode in entry.modes {
            let first = if *mode == Mode::X32 { X32_BIT } else { 0 };
            otherwise.insert(first, of_mode(*mode));
            if !modes.contains(mode) {
                continue;
            }
            for Chosen { name, rule } in chosen {
                let Some(number) = numbers::number(name, *mode) else { continue };
                let of_call = rules.entry(number).or_default();
                if of_call.iter().any(|earlier| earlier.when.is_empty()) {
                    continue;
                }
                if rule.when.is_empty() {
                    of_call.clear();
                }
                if !of_call.contains(rule) {
                    of_call.push(rule.clone());
                }
            }
        }
        for of_call in rules.values_mut() {
            // Sorting keeps the order of equal elements.
            of_call.sort_by_key(|rule| rule.action.strictness());
        }
        Table { architecture: entry.architecture, otherwise, rules }
    }

    /// Returns an error about a quoted text of the file.
    fn error(&self, quoted: &str, what: impl Into<String>) -> ProfileError {
        self.error_at(&format!("\"{quoted}\""), what)
    }

    fn error_at(&self, text: &str, what: impl Into<String>) -> ProfileError {
        let before = self.text.find(text).map_or(0, |at| self.text[..at].matches('\n').count());
        ProfileError::Value { line: before + 1, what: what.into() }
    }
}

/// Parses major and minor version of a kernel. Any further text is passed over.
fn version(text: &str) -> Option<(u32, u32)> {
    let mut parts = text.split(['.', '-']);
    let major = parts.next()?.parse().ok()?;
    Some((major, parts.next()?.parse().ok()?))
}

/// Property of every list, for fuzzing and for tests.
#[cfg(any(test, feature = "test-utils"))]
pub(super) mod fuzzing {
    use super::super::program::testing::{Call, decide, run};
    use super::super::{ENTRIES, program};
    use super::{Profile, Surroundings};

    /// Parses bytes as a list. The program of an accepted list decides about its calls and their neighbours, with
    /// arguments around the values of its conditions, as the rules do when they are read one after the other.
    pub(in super::super) fn check(data: &[u8]) {
        let Ok(text) = str::from_utf8(data) else { return };
        let Ok(profile) = Profile::parse(text.to_owned()) else { return };
        for has_capabilities in [false, true] {
            let surroundings = Surroundings { has_capabilities, kernel: (6, 18) };
            let Ok((rules, _)) = profile.rules_in(ENTRIES, &surroundings) else { continue };
            let Ok(program) = program::translate(&rules) else { continue };
            for table in &rules.tables {
                let values = table.rules.values().flatten().flat_map(|rule| &rule.when);
                let values = values.flat_map(|when| [when.value, when.value.wrapping_add(1)]);
                let values: Vec<u64> = values.chain([0]).take(12).collect();
                let numbers = table.rules.keys().flat_map(|n| [*n, n.saturating_add(1)]);
                for number in numbers.chain([0, 1 << 30, u32::MAX]) {
                    for value in &values {
                        let architecture = table.architecture;
                        let call = Call { architecture, number, arguments: [*value; 6] };
                        let decided = run(&program, &call);
                        assert_eq!(decided, Some(decide(&rules, &call).value()), "{call:x?}");
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
