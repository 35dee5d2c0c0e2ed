//! A compromised driver domain and a compromised frontend: what they can reach from inside their sandboxes.
//!
//! The program has no usual test harness, because it plays all roles. Started by `cargo test` it starts itself as
//! `run`, and so as launcher, supervisors, driver domain and frontends, exactly as `ringfence` does. Its driver
//! domain and its frontends do their work. In addition a thread in each process with arenas attacks. The
//! victims are the frontend of a real guest of the real `ringfence`, and every other process.
//!
//! The result of each attack is a line on standard error, which `run -v` relays: `[NAME: refused by ERRNO]` or
//! `[NAME: SUCCEEDED]`. An attack that never succeeds would prove nothing. The same functions therefore also
//! run outside a sandbox, against a process of the same user and an arena of the same kind. The attacks that
//! a machine allows at all must succeed there.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "in a test, a failure is a panic")]

mod support;

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use clap::Parser;
use ringfence::cli::Cli;
use ringfence_block::storage::file::check_uring;
use ringfence_sandbox::DomainKind;
use ringfence_sandbox::isolation::Isolation;
use ringfence_sys::namespaces::inheritable_fds;
use ringfence_testkit::attack::{self, RingLayout, Window};
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::io::Errno;
use rustix::process::Pid;

use support::needs::Need;
use support::{Lab, MOMENT, Running, eventually};

/// Number of process ids above those in use that an attacker tries. The other processes of its switch get these.
const BEYOND: i32 = 3000;
/// Minimum number of arena files that a frontend grants or a driver domain maps: one writable file and one that is
/// read-only.
const ARENA_FILES: usize = 2;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[1..] {
        ["internal", "driver"] => {
            let (targets, layout) = (numbers_in_use(), RingLayout::learn());
            ringfence_driver::switch::process::main_taken_over(move || {
                attack_from_inside(targets, layout, true)
            })
            .into()
        }
        ["internal", "frontend"] => {
            let targets = numbers_in_use();
            ringfence_frontend::process::main_taken_over(move || {
                attack_from_inside(targets, None, false)
            })
            .into()
        }
        ["run" | "internal", ..] => ringfence::main_with(Cli::parse()).into(),
        ["threaded"] => {
            enter_with_two_threads();
            ExitCode::SUCCESS
        }
        ["victim"] => {
            println!("ready");
            // The process waits for the end of the test.
            let _ = io::copy(&mut io::stdin(), &mut io::sink());
            ExitCode::SUCCESS
        }
        ["unboxed", victim] => {
            attack_without_sandbox(victim.parse().unwrap());
            ExitCode::SUCCESS
        }
        _ => support::harness::main(&[
            ("attacks_succeed_without_the_sandbox", attacks_succeed_without_the_sandbox),
            ("a_taken_over_driver_domain_in_copy_mode_reaches_nothing", || taken_over("copy")),
            ("a_taken_over_driver_domain_in_map_mode_reaches_nothing", || taken_over("map")),
            ("process_with_a_second_thread_cannot_enter_the_sandbox", second_thread_is_refused),
        ]),
    }
}

fn second_thread_is_refused() {
    let said = Command::new("/proc/self/exe").arg("threaded").output().unwrap().stdout;
    let said = String::from_utf8_lossy(&said).into_owned();
    assert!(said.contains("refused: ") && said.contains("threads"), "{said}");
}

/// Tries to enter the sandbox while another thread exists, which would keep its rights.
fn enter_with_two_threads() {
    // The caller of the test may have left descriptors open, which the sandbox would refuse first.
    let inherited = inheritable_fds().unwrap();
    std::thread::spawn(|| std::thread::sleep(MOMENT));
    match Isolation::enter(DomainKind::Frontend, &inherited) {
        Ok(_) => println!("entered"),
        Err(error) => println!("refused: {error}"),
    }
}

// ---------------------------------------------------------------------------------------------
// The attacker

/// Results of attacks by name: the errno of the last refusal, or `None` if one attempt succeeded.
#[derive(Default)]
struct Outcomes(BTreeMap<&'static str, Option<i32>>);

impl Outcomes {
    fn note<T>(&mut self, attack: &'static str, outcome: io::Result<T>) {
        let errno = match outcome {
            Ok(_) => None,
            // The access was allowed, although there was nothing at the address.
            Err(error) if error.raw_os_error() == Some(Errno::FAULT.raw_os_error()) => None,
            Err(error) => Some(error.raw_os_error().unwrap_or(0)),
        };
        let noted = self.0.entry(attack).or_insert(errno);
        // One success among many attempts counts as success.
        *noted = noted.and(errno);
    }

    fn print(&self) {
        for (attack, errno) in &self.0 {
            match errno {
                Some(errno) => say(&format!("[{attack}: refused by {errno}]")),
                None => say(&format!("[{attack}: SUCCEEDED]")),
            }
        }
    }
}

/// Prints a line at once, in one piece, for the supervisor to relay.
fn say(line: &str) {
    // A lost line makes the test fail.
    let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Returns an upper bound for the process ids to try. It needs `/proc`; a real attacker would have to guess.
fn numbers_in_use() -> i32 {
    let used = support::processes::all().iter().map(|p| p.pid.as_raw_nonzero().get()).max();
    used.unwrap_or(1).saturating_add(BEYOND)
}

/// Runs all attacks of a process in its sandbox. A granter may itself write to its memory; only a grantee
/// (`is_lent_to`) has a file that is read-only.
fn attack_from_inside(last_pid: i32, layout: Option<RingLayout>, is_lent_to: bool) {
    let is_read_only = |arena: &OwnedFd| attack::is_read_only(arena.as_fd()).unwrap_or(false);
    // The arenas of a guest need time to appear.
    eventually(MOMENT, || {
        let arenas = attack::sealed_files();
        arenas.len() >= ARENA_FILES && (!is_lent_to || arenas.iter().any(is_read_only))
    });
    let mut outcomes = Outcomes::default();
    // In its own PID namespace, 1 is the attacker itself and the next ids are its threads. These calls must not
    // reach even them.
    (2..=last_pid).filter_map(Pid::from_raw).for_each(|pid| attack_process(pid, &mut outcomes));
    for everybody in [-1, 0] {
        outcomes.note("kill everybody", attack::may_kill(everybody));
    }
    attack_system(&mut outcomes);
    // The rings of a driver domain serve its disks; a frontend has none.
    if let (Some(ring), Some(layout)) = (attack::find_ring(), layout) {
        attack_ring(ring, layout, &mut outcomes);
    }
    let files = attack::sealed_files();
    attack_arenas(&files, &mut outcomes);
    outcomes.print();
    say(&format!("[attacked: {} files, processes up to {last_pid}]", files.len()));
}

fn attack_without_sandbox(victim: i32) {
    let mut outcomes = Outcomes::default();
    let pid = Pid::from_raw(victim).unwrap();
    attack_process(pid, &mut outcomes);
    outcomes.note("kill everybody", attack::may_kill(-1));
    let memory = format!("/proc/{victim}/mem");
    outcomes.note("open memory of", std::fs::File::open(memory));
    attack_system(&mut outcomes);
    if let (Ok(ring), Some(layout)) = (attack::io_uring(), RingLayout::learn()) {
        attack_ring(ring, layout, &mut outcomes);
    }
    let (writable, read_only) = arena_files();
    attack_arenas(&[writable, read_only], &mut outcomes);
    outcomes.print();
}

/// Creates an arena file as a granter does, and the read-only descriptor that it hands out.
fn arena_files() -> (OwnedFd, OwnedFd) {
    const HUGE: u64 = 4 << 20;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let writable = rustix::fs::memfd_create("arena", flags).unwrap();
    rustix::fs::ftruncate(&writable, HUGE).unwrap();
    rustix::fs::fcntl_add_seals(&writable, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    let path = format!("/proc/self/fd/{}", writable.as_raw_fd());
    let read_only =
        rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).unwrap();
    (writable, read_only)
}

fn attack_process(pid: Pid, outcomes: &mut Outcomes) {
    outcomes.note("process_vm_readv", attack::read_memory_of(pid));
    outcomes.note("process_vm_writev", attack::write_memory_of(pid));
    outcomes.note("ptrace", attack::trace(pid));
    outcomes.note("kill", attack::may_kill(pid.as_raw_nonzero().get()));
    outcomes.note("tgkill", attack::may_kill_thread(pid));
    let handle = attack::open_process(pid);
    // Without a process descriptor the calls use a descriptor of another kind.
    let number = handle.as_ref().map_or(2, AsRawFd::as_raw_fd);
    outcomes.note("pidfd_getfd", attack::take_descriptor(number, 0));
    // There is no memory at the address.
    let advised = attack::advise_process(number).or_else(allowed_if(Errno::NOMEM));
    outcomes.note("process_madvise", advised);
    outcomes.note("pidfd_open", handle);
}

fn attack_system(outcomes: &mut Outcomes) {
    for path in [c"/", c"/proc/self/mem", c"/proc/1/mem", c"/etc/passwd", c"/dev/net/tun"] {
        outcomes.note("openat", attack::open(path, libc::O_RDONLY));
        outcomes.note("openat2", attack::open_new(path, 0));
        #[cfg(target_arch = "x86_64")]
        outcomes.note("open", attack::open_old(path, libc::O_RDONLY));
    }
    for family in [libc::AF_INET, libc::AF_INET6, libc::AF_UNIX, libc::AF_NETLINK] {
        outcomes.note("socket", attack::socket(family, libc::SOCK_DGRAM));
    }
    outcomes.note("memfd_create", attack::memory_file());
    outcomes.note("io_uring_setup", attack::io_uring());
    outcomes.note("userfaultfd", attack::userfaultfd());
    outcomes.note("prctl", attack::become_dumpable());
    outcomes.note("prlimit64 of a high address", attack::set_limit_from_high_address());
    outcomes.note("perf_event_open", attack::performance_counter());
    outcomes.note("bpf", attack::bpf_map());
    outcomes.note("fork", attack::fork());
    outcomes.note("fsopen", attack::open_file_system());
    outcomes.note("execve", attack::execute(c"/nonexistent").or_else(allowed_if(Errno::NOENT)));
    outcomes.note("mount", attack::mount_proc(c"/nonexistent").or_else(allowed_if(Errno::NOENT)));
    // Last, because it would change the place of the other attempts.
    for flags in [libc::CLONE_NEWUSER, libc::CLONE_NEWNS, libc::CLONE_NEWNET, libc::CLONE_FS] {
        outcomes.note("unshare", attack::unshare(flags));
    }
}

/// Operations of io_uring that disks use: `readv`, `writev`, `fsync`, `fallocate`, `read`, `write`.
const DISK_OPERATIONS: [u8; 6] = [1, 2, 3, 17, 22, 23];
/// Number of operations of io_uring in Linux 5.10, all of which an attacker tries.
const OPERATIONS: u8 = 37;
/// Number of registrations of io_uring in Linux 6.18.
const REGISTRATIONS: u32 = 36;

/// Uses a ring for what the filter of system calls denies.
fn attack_ring(ring: OwnedFd, layout: RingLayout, outcomes: &mut Outcomes) {
    let Ok(ring) = attack::RingMemory::map(ring, layout) else { return };
    outcomes.note("open by a ring", ring.submit(&attack::open_entry()));
    outcomes.note("socket by a ring", ring.submit(&attack::socket_entry()));
    // Without a file the operations of disks fail, so they show whether a flag is accepted.
    let is_accepted = allowed_if(Errno::BADF);
    for flags in [1 << 0, 1 << 1, 1 << 4] {
        let submitted = ring.submit(&attack::plain_entry(3, flags)).map(drop);
        outcomes.note("flags of an operation of a ring", submitted.or_else(&is_accepted));
    }
    outcomes.note("enter a ring with other flags", attack::enter_ring_with_flags(ring.file()));
    for what in 0..REGISTRATIONS {
        outcomes.note("register with a ring", attack::register_with_ring(ring.file(), what));
    }
    for code in (0..OPERATIONS).filter(|code| !DISK_OPERATIONS.contains(code)) {
        let refused = ring.submit(&attack::plain_entry(code, 0));
        outcomes.note(
            "other operation of a ring",
            match refused {
                Err(error) if error.raw_os_error() == Some(Errno::ACCESS.raw_os_error()) => {
                    Err(error)
                }
                _ => Ok(()),
            },
        );
    }
}

/// Treats the error `later` as success: the call passed the check of rights and failed afterwards.
fn allowed_if(later: Errno) -> impl Fn(io::Error) -> io::Result<()> {
    move |error| {
        if error.raw_os_error() == Some(later.raw_os_error()) { Ok(()) } else { Err(error) }
    }
}

fn attack_arenas(files: &[OwnedFd], outcomes: &mut Outcomes) {
    for file in files.iter().map(AsFd::as_fd) {
        let length = usize::try_from(rustix::fs::fstat(file).unwrap().st_size).unwrap();
        outcomes.note("truncate an arena", attack::truncate(file));
        outcomes.note("seal an arena", attack::seal_future_writes(file));
        if let Ok(window) = Window::new(file, length, false) {
            outcomes.note("MADV_COLLAPSE", window.advise(libc::MADV_COLLAPSE));
            outcomes.note("MADV_HUGEPAGE", window.advise(libc::MADV_HUGEPAGE));
            outcomes.note("mprotect to code", window.protect(libc::PROT_READ | libc::PROT_EXEC));
        }
        if attack::is_read_only(file).unwrap() {
            attack_read_only(file, length, outcomes);
        }
    }
}

fn attack_read_only(file: BorrowedFd<'_>, length: usize, outcomes: &mut Outcomes) {
    outcomes.note("map read-only arena for writing", Window::new(file, length, true));
    outcomes.note("write to read-only arena", attack::write_nothing(file));
    outcomes.note("punch read-only arena", attack::punch(file));
    let path = format!("/proc/self/fd/{}\0", file.as_raw_fd());
    let path = std::ffi::CStr::from_bytes_with_nul(path.as_bytes()).unwrap();
    outcomes.note("re-open read-only arena for writing", attack::open(path, libc::O_RDWR));
    if let Ok(window) = Window::new(file, length, false) {
        let write = libc::PROT_READ | libc::PROT_WRITE;
        outcomes.note("mprotect read-only arena for writing", window.protect(write));
    }
}

// ---------------------------------------------------------------------------------------------
// The tests

/// Attacks that no machine allows: a read-only file stays read-only unless it is opened again.
const NEVER: [&str; 5] = [
    "map read-only arena for writing",
    "write to read-only arena",
    "punch read-only arena",
    "mprotect read-only arena for writing",
    "truncate an arena",
];
/// Attacks that some machines forbid to all users, and others to all but root.
const DEPENDS: [&str; 11] = [
    "MADV_COLLAPSE",
    "MADV_HUGEPAGE",
    "perf_event_open",
    "userfaultfd",
    "io_uring_setup",
    "socket by a ring",
    "bpf",
    "fsopen",
    "mount",
    "process_madvise",
    "kill everybody",
];

/// Returns the results between brackets, by name. A line may arrive in pieces, and the launcher puts the name of the
/// process before each.
fn outcomes(text: &str, process: &str) -> BTreeMap<String, String> {
    let prefix = format!("ringfence: {process}: ");
    let said: String = text.lines().filter_map(|line| line.strip_prefix(&prefix)).collect();
    said.split('[')
        .filter_map(|part| part.split_once(']')?.0.split_once(": "))
        .map(|(name, outcome)| (name.to_owned(), outcome.to_owned()))
        .collect()
}

fn attacks_succeed_without_the_sandbox() {
    let this = std::env::current_exe().unwrap();
    let mut victim = Command::new(&this)
        .arg("victim")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let attacker =
        Command::new(&this).arg("unboxed").arg(victim.id().to_string()).output().unwrap();
    drop(victim.stdin.take());
    victim.wait().unwrap();
    let said = String::from_utf8(attacker.stderr).unwrap();
    assert!(attacker.status.success(), "{said}");
    let prefixed: String =
        said.lines().map(|line| format!("ringfence: attacker: {line}\n")).collect();
    let found = outcomes(&prefixed, "attacker");
    for (name, outcome) in &found {
        let (name, succeeded) = (name.as_str(), outcome == "SUCCEEDED");
        if NEVER.contains(&name) {
            assert!(!succeeded, "{name} should be impossible: {said}");
        } else if !DEPENDS.contains(&name) {
            assert!(succeeded, "{name} fails even without a sandbox, so proves nothing: {said}");
        }
    }
    for name in ["process_vm_readv", "ptrace", "pidfd_getfd", "open memory of", "kill"] {
        assert!(found.contains_key(name), "{name} was not tried: {said}");
    }
    let root = rustix::process::geteuid().is_root();
    for name in ["io_uring_setup", "MADV_COLLAPSE"].iter().filter(|_| root) {
        if found[*name] != "SUCCEEDED" {
            eprintln!("note: {name} is not to be had on this machine, sandbox or not");
        }
    }
}

/// Runs guests on a switch whose driver domain and first frontend attack, and checks the results.
fn taken_over(mode: &str) {
    require!(Need::Guests);
    let lab = Lab::of(std::env::current_exe().unwrap());
    let honest = Lab::new();
    // This guest is on another switch. Its process ids are below the attackers'.
    let stranger = honest.run("--switch victim", &["sleep", "300"]);
    stranger.wait_up();
    let options = format!("-v --switch s --mode {mode}");
    let image = lab.file("disk");
    std::fs::write(&image, [0; 1 << 16]).unwrap();
    let disk = format!("--disk {}", image.display());
    let first = lab.run(&format!("{options} --name a {disk}"), &["sleep", "300"]);
    first.wait_up();
    // A guest of a correct switch, whose driver domain does not attack.
    let program = env!("CARGO_BIN_EXE_ringfence");
    let words = [
        program, "run", "-v", "--uplink", "none", "--switch", "s", "--name", "b", "--", "sleep",
        "300",
    ];
    let second = lab.spawn(&words);
    second.wait_up();
    let victims = [&stranger, &second, &first];
    for attacker in ["driver domain", "frontend"] {
        check_attacker(&first, attacker, &victims);
    }
    // The attackers served their guests meanwhile, and still do.
    let ping = lab.spawn(&[
        program, "run", "-q", "--uplink", "none", "--switch", "s", "--", "getent", "hosts", "b",
    ]);
    ping.succeed(MOMENT);
    for running in [first, second, stranger] {
        assert_eq!(
            running.end().status,
            Some(143),
            "every guest was there until it was told to end"
        );
    }
    lab.assert_no_switch();
    honest.assert_no_switch();
}

fn check_attacker(launcher: &Running, attacker: &str, victims: &[&Running]) {
    let said = || outcomes(&launcher.stderr.text(), attacker);
    let done = eventually(Duration::from_secs(60), || said().contains_key("attacked"));
    assert!(done, "the {attacker} never finished its attacks");
    let mut found = said();
    let attacked = found.remove("attacked").unwrap();
    assert!(found.len() > 25, "attacks of the {attacker} are missing: {found:?}");
    let succeeded = found.iter().filter(|(_, outcome)| *outcome == "SUCCEEDED").count();
    assert_eq!(succeeded, 0, "the {attacker} was not stopped: {found:?}");
    let on_arenas = ["map read-only arena for writing", "re-open read-only arena for writing"];
    let on_arenas = on_arenas.iter().filter(|_| attacker == "driver domain");
    for needed in ["MADV_COLLAPSE", "process_vm_readv", "pidfd_getfd"].iter().chain(on_arenas) {
        assert!(found.contains_key(*needed), "the {attacker} did not try {needed}: {found:?}");
    }
    if attacker == "driver domain" {
        let has_ring = found.contains_key("open by a ring");
        assert!(has_ring || check_uring().is_err(), "the {attacker} had no ring: {found:?}");
    }
    let last: i32 = attacked.rsplit(' ').next().unwrap().parse().unwrap();
    for process in victims.iter().flat_map(|victim| victim.processes()) {
        let pid = process.pid.as_raw_nonzero().get();
        assert!(pid <= last, "process {pid} was not attacked, only those up to {last}");
    }
}
