//! Guarantees of the sandbox: it denies what it promises to deny, and the work inside is possible.
//!
//! The program has no usual test harness, because it plays all roles. Started by `cargo test` it is the launcher. It
//! starts itself again as a supervisor, and as the inner process of a frontend or a driver domain, exactly as
//! `ringfence` does. The inner process enters the stages of the sandbox, makes attempts in each, and sends the
//! results over its channel.

#![allow(clippy::unwrap_used, reason = "in a test, a failure is a panic")]

#[path = "support/harness.rs"]
mod harness;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::CommandExt;
use std::process::ExitCode;
use std::time::Duration;

use ringfence_sandbox::ids::may_map_any;
use ringfence_sandbox::isolation::Isolation;
use ringfence_sandbox::spawn::{Spawn, SpawnError};
use ringfence_sandbox::supervisor;
use ringfence_sandbox::{Channel, DomainKind, DomainProcess};
use rustix::event::{EventfdFlags, PollFd, PollFlags};
use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType};
use rustix::process::{DumpableBehavior, Pid, PidfdFlags, Signal};
use serde::{Deserialize, Serialize};

const MOMENT: Duration = Duration::from_secs(60);

/// Result of an attempt: its name, and the errno.
type Attempt = (String, Option<i32>);

/// Results of the inner process.
#[derive(Debug, Serialize, Deserialize)]
struct Report {
    /// Conditions of the process in the first stage.
    condition: Vec<(String, String)>,
    /// Attempts with the namespaces, but without the system call filter.
    isolated: Vec<Attempt>,
    /// Attempts with the system call filter.
    locked: Vec<Attempt>,
    /// Operations that must work with the system call filter.
    work: Vec<Attempt>,
}

/// Message to the inner process: ids of processes to attack.
#[derive(Serialize, Deserialize)]
struct Orders {
    victims: Vec<i32>,
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        [_, "internal", "supervisor", kind] => {
            return supervisor::main(kind_named(kind), &[]).into();
        }
        [_, "internal", kind] => inner(kind_named(kind)),
        [_, "as-user"] => outer("as an ordinary user"),
        _ => {
            let name = "domains_of_each_kind_deny_and_permit_what_they_promise";
            return harness::main(&[(name, for_each_user)]);
        }
    }
    ExitCode::SUCCESS
}

fn for_each_user() {
    if rustix::process::geteuid().is_root() {
        outer("as root");
        as_ordinary_user();
    } else {
        outer("as an ordinary user");
    }
}

fn kind_named(name: &str) -> DomainKind {
    match name {
        "driver" => DomainKind::Driver,
        "frontend" => DomainKind::Frontend,
        "uplink" => DomainKind::Uplink,
        "disk" => DomainKind::Disk,
        "proxy" => DomainKind::Proxy,
        "card" => DomainKind::Card,
        "shield" => DomainKind::Shield,
        other => panic!("{other}"),
    }
}

// ---------------------------------------------------------------------------------------------
// The launcher

fn outer(who: &str) {
    if let Err(error) = try_start(DomainKind::Frontend) {
        return skip(&format!("no sandbox can be made here: {error}"));
    }
    for kind in DomainKind::ALL.into_iter().filter(|kind| kind.is_sandboxed()) {
        // The other domain of a pair is a sibling, with the same user or another.
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

/// Runs the tests as an ordinary user, whose domains are created in another way than root's.
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
    let spawn = Spawn { kind, command: &[], inherit: &[], cleanup: None, cgroup: None };
    DomainProcess::start(&spawn)
}

fn start(kind: DomainKind) -> DomainProcess {
    try_start(kind).unwrap()
}

fn examine(kind: DomainKind, victim: i32) -> Report {
    let domain = start(kind);
    let own = i32::try_from(std::process::id()).unwrap();
    let supervisor = i32::try_from(domain.supervisor_pid()).unwrap();
    let orders = Orders { victims: vec![victim, own, supervisor, 2] };
    // A failure up to here shows below.
    let _ = domain.channel().send(&orders, &[]);
    let report = domain.channel().receive_within::<Report>(MOMENT);
    match report {
        Ok((report, _)) => report,
        Err(error) => panic!("{kind:?}: {error}: {:?}", domain.wait_ended(MOMENT)),
    }
}

/// Returns the process id of the inner process, which is a child of the supervisor.
fn inner_pid(domain: &DomainProcess) -> i32 {
    let supervisor = domain.supervisor_pid();
    let children = format!("/proc/{supervisor}/task/{supervisor}/children");
    std::fs::read_to_string(children).unwrap().trim().parse().unwrap()
}

/// Work that the disk of a virtual machine does not do.
const NOT_FOR_DISKS: [&str; 2] = ["lent: an arena's file system", "O_NONBLOCK"];

/// Work that the network card of a virtual machine does not do.
const NOT_FOR_CARDS: [&str; 1] = ["O_NONBLOCK"];

/// Work that the proxy before a foreign backend does not do: it maps no memory of a machine, and writes none. A shield
/// reads and writes mapped memory alone, and waits by an epoll.
const NOT_FOR_PROXIES: [&str; 6] = [
    "epoll",
    "lent: write to an arena",
    "lent: punch an arena",
    "lent: an arena's size",
    "lent: an arena's file system",
    "O_NONBLOCK",
];

fn check(kind: DomainKind, report: &Report) {
    for (what, found) in &report.condition {
        assert_eq!(found, "as it should be", "{kind:?}: {what}");
    }
    for (what, errno) in &report.isolated {
        assert!(errno.is_some(), "{kind:?}, without the list: {what} worked");
    }
    for (what, errno) in &report.locked {
        // With ENOSYS the C library does without clone3.
        let denied =
            matches!(errno.map(Errno::from_raw_os_error), Some(Errno::PERM | Errno::NOSYS));
        assert!(denied, "{kind:?}: {what} is not denied: {errno:?}");
    }
    for (what, errno) in &report.work {
        let not_for_it = what.starts_with("hub: ") && kind != DomainKind::Driver
            || what.starts_with("lent: ") && kind == DomainKind::Uplink
            || what.starts_with("uplink: ") && kind != DomainKind::Uplink
            || NOT_FOR_DISKS.contains(&what.as_str()) && kind == DomainKind::Disk
            || NOT_FOR_CARDS.contains(&what.as_str()) && kind == DomainKind::Card
            || NOT_FOR_PROXIES.contains(&what.as_str()) && kind == DomainKind::Proxy
            || what != "epoll"
                && (what == "lent: read from an arena" || NOT_FOR_PROXIES.contains(&what.as_str()))
                && kind == DomainKind::Shield;
        assert_eq!(errno.is_some(), not_for_it, "{kind:?}: {what}: {errno:?}");
    }
}

/// Checks the properties of a domain that other processes see.
fn from_outside(domain: &DomainProcess, pid: i32) {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    // Fields after the name in parentheses: state, parent, process group, session.
    let session: u32 =
        stat.rsplit_once(") ").unwrap().1.split(' ').nth(3).unwrap().parse().unwrap();
    assert_eq!(session, domain.supervisor_pid(), "a session of its own");
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
    // A process that is only a victim gets no message and waits here.
    let Ok((orders, _)) = channel.receive::<Orders>() else { return };
    let condition = condition(kind);
    let isolated = reach_others(&orders.victims);
    let tools = Tools::new();
    isolation.lock().unwrap();
    let mut locked = reach_others(&orders.victims);
    locked.extend(forbidden(kind));
    let work = work(&tools);
    channel.send(&Report { condition, isolated, locked, work }, &[]).unwrap();
    // The process waits until the launcher has read the results.
    let _ = channel.receive::<()>();
}

fn condition(kind: DomainKind) -> Vec<(String, String)> {
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
    be("is killed with its supervisor", death == Some(Signal::KILL), format!("{death:?}"));
    let core = rustix::process::getrlimit(rustix::process::Resource::Core);
    be("no core files", core.maximum == Some(0), format!("{core:?}"));
    // Landlock, where the kernel has it, denies this look to an uplink too.
    let denied = Some(Errno::ACCESS.raw_os_error());
    let root = std::fs::read_dir("/").map(Iterator::count).map_err(|error| error.raw_os_error());
    let by_landlock = kind == DomainKind::Uplink && root == Err(denied);
    be("an empty root", root == Ok(0) || by_landlock, format!("{root:?}"));
    let made = std::fs::create_dir("/x").map_err(|error| error.raw_os_error());
    let read_only =
        made == Err(Some(Errno::ROFS.raw_os_error())) || by_landlock && made == Err(denied);
    be("a root that cannot be written to", read_only, format!("{made:?}"));
    let environment: Vec<_> = std::env::vars_os().collect();
    be("no environment", environment.is_empty(), format!("{environment:?}"));
    found
}

fn attempt<T>(what: impl Into<String>, result: Result<T, impl Into<io::Error>>) -> Attempt {
    (what.into(), result.err().map(|error| error.into().raw_os_error().unwrap_or(-1)))
}

/// Tries everything that would affect another process. The filter alone and the namespaces alone must each
/// deny it.
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
    // The root directory exists and is empty; ".." does not lead out of it.
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

/// Tries calls that only the system call filter denies.
fn forbidden(kind: DomainKind) -> Vec<Attempt> {
    use ringfence_sys::namespaces::{Fresh, unshare};
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
        attempt("outlive the supervisor", rustix::process::set_parent_process_death_signal(None)),
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
    ];
    if kind == DomainKind::Uplink {
        all.extend(forbidden_to_uplinks());
    } else {
        all.push(attempt("what waits in a descriptor", rustix::io::ioctl_fionread(&own)));
    }
    for family in [AddressFamily::UNIX, AddressFamily::INET, AddressFamily::NETLINK] {
        let socket = rustix::net::socket_with(family, SocketType::RAW, unix, None);
        all.push(attempt(format!("a socket of family {family:?}"), socket));
    }
    all
}

/// Tries to create sockets that an uplink does not need, and to change the process's own properties.
fn forbidden_to_uplinks() -> Vec<Attempt> {
    use rustix::net::sockopt;
    let with = |family, kind| rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None);
    let tcp = with(AddressFamily::INET, SocketType::STREAM).unwrap();
    vec![
        attempt("a packet socket", with(AddressFamily::PACKET, SocketType::DGRAM)),
        attempt("a vsock", with(AddressFamily::VSOCK, SocketType::STREAM)),
        attempt("a raw socket of IPv6", with(AddressFamily::INET6, SocketType::RAW)),
        attempt("a local socket", with(AddressFamily::UNIX, SocketType::STREAM)),
        attempt("to listen", rustix::net::listen(&tcp, 1)),
        attempt("datagrams to all", sockopt::set_socket_broadcast(&tcp, true)),
    ]
}

/// Resources that are created before the filter is in force, as a frontend does.
struct Tools {
    arena: std::os::fd::OwnedFd,
    /// Socket for the network of an uplink. Domains of other kinds have no use for it.
    server: Option<std::net::TcpListener>,
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
        let server = std::net::TcpListener::bind(("127.0.0.1", 0)).ok();
        Tools { arena, server, pair: pair.unwrap() }
    }
}

/// Does the usual work of frontends and driver domains.
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
        attempt("lent: write to an arena", rustix::io::pwrite(&tools.arena, b"x", 4096)),
        attempt("lent: read from an arena", rustix::io::pread(&tools.arena, &mut [0; 8][..], 4096)),
        attempt("lent: punch an arena", rustix::fs::fallocate(&tools.arena, punch, 0, 4096)),
        attempt("lent: an arena's seals", rustix::fs::fcntl_get_seals(&tools.arena)),
        attempt("lent: an arena's size", rustix::fs::fstat(&tools.arena)),
        attempt("lent: an arena's file system", rustix::fs::fstatfs(&tools.arena)),
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
        attempt("uplink: connections and datagrams", carry(tools)),
    ]
}

/// Does an uplink's work with sockets of the host, by its own code. Every call must be on the list.
fn carry(tools: &Tools) -> Result<(), Errno> {
    use ringfence_uplink::host::datagrams::ReceiveBuffer;
    use ringfence_uplink::host::real::RealHost;
    use ringfence_uplink::host::{Close, DatagramHost, Host, Owner, OwnerKind, TcpHost};
    use ringfence_uplink::packet::{Marks, PathDiscovery};
    use std::io::{IoSliceMut, Write};
    let io = |error: io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
    let mut host = RealHost::new(std::sync::Arc::default())?;
    let owner = |kind| Owner { kind, index: 1, generation: 0 };
    let to = ([127, 0, 0, 1], 9).into();
    let mut datagrams = host.open_udp(owner(OwnerKind::Udp), 0, to)?;
    datagrams.send(&[1; 4000], Some(1000), None)?;
    // A new class makes the kernel forget the path.
    assert!(datagrams.path_mtu().is_some());
    datagrams.set_marks(Marks { hops: 3, class: 0xb8, discovery: PathDiscovery::Guest });
    // No process listens there, so an error comes now or later.
    let _ = datagrams.receive(&mut ReceiveBuffer::default());
    let _ = datagrams.error(&mut [0; 64]);
    let server = tools.server.as_ref().ok_or(Errno::NOTCONN)?;
    let socket = host.connect(owner(OwnerKind::Tcp), server.local_addr().map_err(io)?)?;
    let (mut peer, _) = server.accept().map_err(io)?;
    peer.write_all(&[7; 100]).map_err(io)?;
    rustix::net::send(&peer, b"!", SendFlags::OOB)?;
    let mut ready = Vec::new();
    while !ready.iter().any(|ready: &ringfence_uplink::host::Ready| ready.what.readable) {
        host.poll(&mut ready, None)?;
    }
    let mut bytes = [0; 64];
    for offset in [0, 10] {
        let n = host.peek(&socket, offset, &mut [IoSliceMut::new(&mut bytes)])?;
        assert_eq!((n, bytes[0]), (64, 7), "at {offset}");
    }
    assert_eq!(host.discard(&socket, 50)?, 50);
    let _ = host.urgent_mark(&socket);
    assert!(host.send_room(&socket).free() > 0);
    assert_eq!(host.unacknowledged(&socket), 0);
    host.set_class(&socket, 0xb8);
    host.await_room(&socket);
    host.shut_down(&socket);
    host.error(&socket).map_or(Ok(()), Err)?;
    host.close(socket, Close::Reset);
    let adopted = host.adopt(owner(OwnerKind::Tcp), peer.into())?;
    host.close(adopted, Close::Orderly);
    // The system decides whether echo requests may be sent.
    match host.open_echo(owner(OwnerKind::Icmp), 7, [127, 0, 0, 1].into()) {
        Ok(mut echo) => echo.send(&[8, 0, 0, 0, 0, 7, 0, 1], None, None),
        Err(Errno::ACCESS) => Ok(()),
        Err(errno) => Err(errno),
    }
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

/// Grows an allocation. The allocator would use `mremap`, and must do without it.
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
    // The hash keys of one thread's second state differ by one; those of another thread differ entirely.
    let b = std::thread::spawn(|| RandomState::new().hash_one(1)).join().unwrap();
    if a == b { Err(io::Error::other("no randomness")) } else { Ok(()) }
}
