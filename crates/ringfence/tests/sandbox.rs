//! That the sandbox holds what it promises, and lets the work be done.
//!
//! A program without the usual test harness, since it plays all parts: started by `cargo test` it
//! is the launcher, and starts itself again as a keeper and as the inner process of a frontend or
//! a driver domain, exactly as `ringfence` does. The inner process goes through the stages of the
//! sandbox and tries things in each; what came of it goes back over its channel.

#![allow(clippy::unwrap_used, reason = "in a test, a failure is a panic")]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::CommandExt;
use std::time::Duration;

use ringfence::sys::ids::may_map_any;
use ringfence::sys::keeper;
use ringfence::sys::sandbox::Isolation;
use ringfence::sys::spawn::{Spawn, SpawnError};
use ringfence::sys::{Channel, DomainKind, DomainProcess};
use rustix::event::{EventfdFlags, PollFd, PollFlags};
use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType};
use rustix::process::{DumpableBehavior, Pid, PidfdFlags, Signal};
use serde::{Deserialize, Serialize};

const MOMENT: Duration = Duration::from_secs(20);

/// What an attempt came to: its name, and the errno.
type Attempt = (String, Option<i32>);

/// What the inner process found.
#[derive(Debug, Serialize, Deserialize)]
struct Report {
    /// Of itself, in the first stage.
    condition: Vec<(String, String)>,
    /// Tried with the namespaces and without the list of system calls.
    isolated: Vec<Attempt>,
    /// Tried with the list.
    locked: Vec<Attempt>,
    /// What must still work, with the list.
    work: Vec<Attempt>,
}

/// What the inner process is told: processes that it shall try to reach.
#[derive(Serialize, Deserialize)]
struct Orders {
    victims: Vec<i32>,
}

fn main() {
    let words: Vec<String> = std::env::args().collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        [_, "internal", "keeper", kind] => {
            std::process::exit(keeper::main(kind_named(kind), &[]).into());
        }
        [_, "internal", kind] => inner(kind_named(kind)),
        // Asked by tools what tests there are.
        [_, "--list", ..] => println!("sandbox: test"),
        [_, "as-user"] => outer("as an ordinary user"),
        _ if rustix::process::geteuid().is_root() => {
            outer("as root");
            as_ordinary_user();
        }
        _ => outer("as an ordinary user"),
    }
}

fn kind_named(name: &str) -> DomainKind {
    match name {
        "driver" => DomainKind::Driver,
        "frontend" => DomainKind::Frontend,
        other => panic!("{other}"),
    }
}

// ---------------------------------------------------------------------------------------------
// The launcher

fn outer(who: &str) {
    if let Err(error) = try_start(DomainKind::Frontend) {
        return skip(&format!("no sandbox can be made here: {error}"));
    }
    for kind in [DomainKind::Driver, DomainKind::Frontend] {
        // The other domain of a pair: same user or not, a sibling.
        let victim = start(DomainKind::Frontend);
        let victim_pid = inner_pid(&victim);
        let report = examine(kind, victim_pid);
        check(kind, &report);
        println!("ok: {kind:?}, {who}: {} attempts", report.isolated.len() + report.locked.len());
        from_outside(&victim, victim_pid);
        drop(victim);
        surplus_descriptors_are_noticed(kind);
    }
}

/// Another user, whoever that is: a domain of an ordinary user is made in another way than root's.
fn as_ordinary_user() {
    let mut again = std::process::Command::new("/proc/self/exe");
    let status = again.arg("as-user").uid(12345).gid(12345).status().unwrap();
    assert!(status.success(), "as an ordinary user: {status}");
}

fn skip(reason: &str) {
    let is_required = std::env::var_os("RINGFENCE_TEST_REQUIRE").is_some_and(|value| value == "1");
    assert!(!is_required, "RINGFENCE_TEST_REQUIRE is set, and {reason}");
    eprintln!("SKIPPED: {reason}");
}

fn try_start(kind: DomainKind) -> Result<DomainProcess, SpawnError> {
    let spawn = Spawn { kind, command: &[], inherit: &[], aftermath: None };
    DomainProcess::start(&spawn)
}

fn start(kind: DomainKind) -> DomainProcess {
    try_start(kind).unwrap()
}

fn examine(kind: DomainKind, victim: i32) -> Report {
    let domain = start(kind);
    let own = i32::try_from(std::process::id()).unwrap();
    let keeper = i32::try_from(domain.keeper_pid()).unwrap();
    let orders = Orders { victims: vec![victim, own, keeper, 2] };
    // Where it has failed by now, that shows below.
    let _ = domain.channel().send(&orders, &[]);
    let report = domain.channel().receive_within::<Report>(MOMENT);
    match report {
        Ok((report, _)) => report,
        Err(error) => panic!("{kind:?}: {error}: {:?}", domain.wait_ended(MOMENT)),
    }
}

/// The process below the keeper.
fn inner_pid(domain: &DomainProcess) -> i32 {
    let keeper = domain.keeper_pid();
    let children = format!("/proc/{keeper}/task/{keeper}/children");
    std::fs::read_to_string(children).unwrap().trim().parse().unwrap()
}

fn check(kind: DomainKind, report: &Report) {
    for (what, found) in &report.condition {
        assert_eq!(found, "as it should be", "{kind:?}: {what}");
    }
    for (what, errno) in &report.isolated {
        assert!(errno.is_some(), "{kind:?}, without the list: {what} worked");
    }
    for (what, errno) in &report.locked {
        // ENOSYS is what makes the C library do without clone3.
        let denied =
            matches!(errno.map(Errno::from_raw_os_error), Some(Errno::PERM | Errno::NOSYS));
        assert!(denied, "{kind:?}: {what} is not denied: {errno:?}");
    }
    for (what, errno) in &report.work {
        let only_for_driver = what.starts_with("hub: ") && kind == DomainKind::Frontend;
        assert_eq!(errno.is_some(), only_for_driver, "{kind:?}: {what}: {errno:?}");
    }
}

/// What the rest of the machine sees of a domain.
fn from_outside(domain: &DomainProcess, pid: i32) {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    // After the name in parentheses: state, parent, group, session.
    let session: u32 =
        stat.rsplit_once(") ").unwrap().1.split(' ').nth(3).unwrap().parse().unwrap();
    assert_eq!(session, domain.keeper_pid(), "a session of its own");
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let field = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().to_owned()
    };
    let uid: u32 = field("Uid:").parse().unwrap();
    if rustix::process::geteuid().is_root() {
        let is_unused = (1_879_048_192..1 << 31).contains(&uid);
        assert!(is_unused || uid == 0 && !may_map_any().unwrap(), "an id that nobody has: {uid}");
    }
}

fn surplus_descriptors_are_noticed(kind: DomainKind) {
    let own = Channel::pair().unwrap();
    let refused = Isolation::enter(kind, &[own.0.as_fd().as_raw_fd()]);
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("inherited by mistake"), "{text}");
}

// ---------------------------------------------------------------------------------------------
// The inner process

fn inner(kind: DomainKind) {
    let channel = Channel::from_stdin().unwrap();
    let isolation = Isolation::enter(kind, &[channel.as_fd().as_raw_fd()]).unwrap();
    // Who is only to be reached gets no orders, and waits here.
    let Ok((orders, _)) = channel.receive::<Orders>() else { return };
    let condition = condition();
    let isolated = reach_others(&orders.victims);
    let tools = Tools::new();
    isolation.lock().unwrap();
    let mut locked = reach_others(&orders.victims);
    locked.extend(forbidden());
    let work = work(&tools);
    channel.send(&Report { condition, isolated, locked, work }, &[]).unwrap();
    // Until the launcher has heard.
    let _ = channel.receive::<()>();
}

fn condition() -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut be = |what: &str, is_so: bool, else_: String| {
        let text = if is_so { "as it should be".to_owned() } else { else_ };
        found.push((what.to_owned(), text));
    };
    let pid = std::process::id();
    be("process 1 of its namespace", pid == 1, format!("it is {pid}"));
    let sets = rustix::thread::capabilities(None).unwrap();
    be(
        "no capability",
        sets.permitted.is_empty() && sets.effective.is_empty(),
        format!("{sets:?}"),
    );
    be("no new privileges", rustix::thread::no_new_privs().unwrap(), "not set".into());
    let dumpable = rustix::process::dumpable_behavior().unwrap();
    be("not dumpable", dumpable == DumpableBehavior::NotDumpable, format!("{dumpable:?}"));
    let death = rustix::process::parent_process_death_signal().unwrap();
    be("dies with its keeper", death == Some(Signal::KILL), format!("{death:?}"));
    let core = rustix::process::getrlimit(rustix::process::Resource::Core);
    be("no core files", core.maximum == Some(0), format!("{core:?}"));
    let root: Vec<_> = std::fs::read_dir("/").unwrap().collect();
    be("an empty root", root.is_empty(), format!("{root:?}"));
    let made = std::fs::create_dir("/x").map_err(|error| error.raw_os_error());
    let read_only = made == Err(Some(Errno::ROFS.raw_os_error()));
    be("a root that cannot be written to", read_only, format!("{made:?}"));
    let environment: Vec<_> = std::env::vars_os().collect();
    be("no environment", environment.is_empty(), format!("{environment:?}"));
    found
}

fn attempt<T>(what: impl Into<String>, result: Result<T, impl Into<io::Error>>) -> Attempt {
    (what.into(), result.err().map(|error| error.into().raw_os_error().unwrap_or(-1)))
}

/// Everything that would reach another process. The filter and the namespaces each must be
/// enough.
fn reach_others(victims: &[i32]) -> Vec<Attempt> {
    let mut all = Vec::new();
    for &victim in victims {
        let pid = Pid::from_raw(victim).unwrap();
        all.push(attempt(format!("kill {victim}"), rustix::process::test_kill_process(pid)));
        let handle = rustix::process::pidfd_open(pid, PidfdFlags::empty());
        all.push(attempt(format!("pidfd_open {victim}"), handle));
        for file in ["mem", "maps", "fd/3", "root"] {
            let path = format!("/proc/{victim}/{file}");
            all.push(attempt(format!("open {path}"), File::open(path)));
        }
    }
    all.push(attempt("kill all", rustix::process::test_kill_process_group(Pid::INIT)));
    for path in ["/proc/self/fd/0", "/dev/null", "/etc/passwd", "/sys"] {
        all.push(attempt(format!("open {path}"), File::open(path)));
    }
    // The root itself is there, and empty; ".." does not lead out of it.
    all.push(attempt("open /../proc", File::open("/../proc")));
    all.push(attempt("start a program", std::process::Command::new("/bin/true").spawn()));
    all.push(attempt(
        "mount",
        rustix::mount::mount("proc", "/", "proc", rustix::mount::MountFlags::empty(), None),
    ));
    all.push(attempt("chroot", rustix::process::chroot("/x")));
    all.push(attempt("set the host name", rustix::system::sethostname(b"x")));
    all
}

/// What the list of system calls denies beyond that.
fn forbidden() -> Vec<Attempt> {
    use ringfence_platform::namespaces::{Fresh, unshare};
    let seal = SealFlags::SEAL;
    let own = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let unix = SocketFlags::CLOEXEC;
    let mut all = vec![
        attempt("open the root", rustix::fs::open("/", OFlags::DIRECTORY, Mode::empty())),
        attempt("memfd_create", rustix::fs::memfd_create("x", MemfdFlags::CLOEXEC)),
        attempt("add a seal", rustix::fs::fcntl_add_seals(&own, seal)),
        attempt("new user namespace", unshare(Fresh::UserAndPid)),
        attempt("new network namespace", unshare(Fresh::MountNetIpcUts)),
        attempt(
            "become dumpable",
            rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable),
        ),
        attempt("outlive the keeper", rustix::process::set_parent_process_death_signal(None)),
        attempt("truncate", rustix::fs::ftruncate(&own, 0)),
        attempt("pipe", rustix::pipe::pipe()),
        attempt(
            "wait for any process",
            rustix::process::wait(rustix::process::WaitOptions::NOHANG),
        ),
        attempt(
            "raise a limit",
            rustix::process::setrlimit(
                rustix::process::Resource::Nofile,
                rustix::process::Rlimit { current: Some(10), maximum: Some(10) },
            ),
        ),
        attempt(
            "sockets of other kinds in pairs",
            rustix::net::socketpair(AddressFamily::INET, SocketType::STREAM, unix, None),
        ),
        attempt("owner of a descriptor's signals", rustix::io::ioctl_fionread(&own)),
    ];
    for family in [AddressFamily::UNIX, AddressFamily::INET, AddressFamily::NETLINK] {
        let socket = rustix::net::socket_with(family, SocketType::RAW, unix, None);
        all.push(attempt(format!("a socket of family {family:?}"), socket));
    }
    all
}

/// Made before the list is in force, as a frontend does.
struct Tools {
    arena: std::os::fd::OwnedFd,
    pair: (std::os::fd::OwnedFd, std::os::fd::OwnedFd),
}

impl Tools {
    fn new() -> Tools {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let arena = rustix::fs::memfd_create("arena", flags).unwrap();
        rustix::fs::ftruncate(&arena, 1 << 20).unwrap();
        let pair = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        );
        Tools { arena, pair: pair.unwrap() }
    }
}

/// What frontends and driver domains do all day.
fn work(tools: &Tools) -> Vec<Attempt> {
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let (a, b) = &tools.pair;
    let named = std::thread::Builder::new().name("worker".into());
    let join = |handle: std::thread::JoinHandle<u32>| handle.join().map_err(|_| Errno::NOTSUP);
    vec![
        attempt("a thread", named.spawn(|| 7).and_then(|t| join(t).map_err(io::Error::from))),
        attempt("many threads that allocate", threads_that_allocate()),
        attempt("a panic that is caught", panic_and_go_on()),
        attempt("a large buffer that grows", grow()),
        attempt("an eventfd", rustix::event::eventfd(0, EventfdFlags::NONBLOCK)),
        attempt("epoll", rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC)),
        attempt("write to an arena", rustix::io::pwrite(&tools.arena, b"x", 4096)),
        attempt("read from an arena", rustix::io::pread(&tools.arena, &mut [0; 8][..], 4096)),
        attempt("punch an arena", rustix::fs::fallocate(&tools.arena, punch, 0, 4096)),
        attempt("an arena's seals", rustix::fs::fcntl_get_seals(&tools.arena)),
        attempt("an arena's size", rustix::fs::fstat(&tools.arena)),
        attempt("an arena's file system", rustix::fs::fstatfs(&tools.arena)),
        attempt("the size by the library", File::from(tools.arena.try_clone().unwrap()).metadata()),
        attempt("map an arena", map_arena(tools)),
        attempt("a message", rustix::net::send(a, b"x", SendFlags::DONTWAIT)),
        attempt(
            "a message with a descriptor",
            Channel::from_fd(a.try_clone().unwrap())
                .send(&1, &[tools.arena.as_fd()])
                .map_err(io::Error::other),
        ),
        attempt(
            "a message's arrival",
            rustix::event::poll(&mut [PollFd::new(b, PollFlags::IN)], None),
        ),
        attempt("O_NONBLOCK", rustix::io::ioctl_fionbio(b, true)),
        attempt("who is at the other end", rustix::net::sockopt::socket_type(b)),
        attempt("sleep", {
            std::thread::sleep(Duration::from_millis(1));
            Ok::<(), Errno>(())
        }),
        attempt("randomness", randomness()),
        attempt("a use of time", rustix::io::fcntl_dupfd_cloexec(a, 3)),
        attempt(
            "hub: a pair of sockets",
            rustix::net::socketpair(
                AddressFamily::UNIX,
                SocketType::STREAM,
                SocketFlags::CLOEXEC,
                None,
            ),
        ),
    ]
}

fn map_arena(tools: &Tools) -> io::Result<()> {
    use ringfence_memory::{Mapping, Protection};
    let mapping = Mapping::new(&tools.arena, 0, 1 << 20, Protection::ReadWrite);
    mapping.map(drop)
}

fn threads_that_allocate() -> io::Result<()> {
    let work = |size: usize| vec![1_u8; size].iter().map(|&byte| usize::from(byte)).sum::<usize>();
    let threads: Vec<_> = (1..20)
        .map(|i| std::thread::Builder::new().spawn(move || work(i * 100_000)))
        .collect::<io::Result<_>>()?;
    let total: usize = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
    assert_eq!(total, (1..20).sum::<usize>() * 100_000);
    Ok(())
}

fn panic_and_go_on() -> io::Result<()> {
    std::panic::set_hook(Box::new(|_| {}));
    let caught = std::panic::catch_unwind(|| panic!("as planned"));
    let _ = std::panic::take_hook();
    caught.err().map(drop).ok_or_else(|| io::Error::other("did not panic"))
}

/// The allocator would like `mremap`, and must do without.
fn grow() -> io::Result<()> {
    let mut buffer = vec![1_u8; 1 << 20];
    for _ in 0..4 {
        buffer.resize(buffer.len() * 2, 1);
    }
    if buffer.iter().all(|&byte| byte == 1) { Ok(()) } else { Err(io::Error::other("content")) }
}

fn randomness() -> io::Result<()> {
    use std::hash::{BuildHasher, RandomState};
    let a = RandomState::new().hash_one(1);
    // The keys of a thread's second state differ by one; of another thread's, wholly.
    let b = std::thread::spawn(|| RandomState::new().hash_one(1)).join().unwrap();
    if a == b { Err(io::Error::other("no randomness")) } else { Ok(()) }
}
