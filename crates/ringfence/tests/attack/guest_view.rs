//! Attacks of a guest's command on the host's files and sockets, as root and as an ordinary user.
//!
//! The command has every capability that its user namespace gives (`--as-root`), or none. It tries to reach what its
//! view of the host's files hides: the runtime directory, other guests' disks, sockets of the host's programs, and the
//! kernel's settings. Each test fails if its guard is removed.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::PathBuf;
use std::process::Command;

use ringfence_block::storage::Disk;
use ringfence_block::storage::testing::Driver;
use ringfence_nbd::client::{NbdAddress, NbdDisk, NbdOptions};

use crate::require;
use crate::support::MOMENT;
use crate::support::needs::Need;
use crate::support::users::{Site, USER};

const ATTACKS: &str =
    concat!(include_str!("../support/attempt.py"), include_str!("../support/guest_view.py"));

/// Returns the targets of the attacks: the runtime directory and a file handle of it.
fn target(site: &Site) -> String {
    let script = "import ctypes,json,sys
buffer = ctypes.create_string_buffer(8 + 128)
ctypes.cast(buffer, ctypes.POINTER(ctypes.c_uint))[0] = 128
libc = ctypes.CDLL(None, use_errno=True)
assert libc.name_to_handle_at(-100, sys.argv[1].encode(), buffer, ctypes.byref(ctypes.c_int()), 0) == 0
size = int.from_bytes(buffer.raw[:4], 'little')
kind = int.from_bytes(buffer.raw[4:8], 'little', signed=True)
print(json.dumps({'runtime': sys.argv[1], 'scratch': sys.argv[2], 'handle': buffer.raw[8:8+size].hex(), 'handle_type': kind}))";
    let scratch = site.lab.file("scratch");
    std::fs::create_dir_all(&scratch).unwrap();
    std::fs::set_permissions(&scratch, PermissionsExt::from_mode(0o777)).unwrap();
    let output = Command::new("python3")
        .args(["-c", script])
        .args([site.lab.runtime_dir(), scratch])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// Checks that each attack was tried and failed.
fn assert_kept_out(said: &str) {
    let attacks: Vec<&str> = said.lines().collect();
    assert_eq!(attacks.len(), ATTACKS.matches("    attempt(\"").count(), "{said}");
    let reached: Vec<_> = attacks.iter().filter(|line| !line.ends_with(": kept out")).collect();
    assert!(reached.is_empty(), "{reached:#?}");
}

#[test]
fn command_with_all_capabilities_never_sees_the_runtime_directory() {
    require!(Need::Guests, Need::Program("python3", "python3"));
    for site in Site::all() {
        let _bystander = site.bystander("");
        let target = target(&site);
        let enter = "cd \"$XDG_RUNTIME_DIR/ringfence\" && exec \"$@\"";
        // Covers hold without a list of system calls.
        for options in [
            "--switch other",
            "--as-root --switch other --seccomp none",
            "--as-root --share-runtime --seccomp none",
        ] {
            let script = site.lab.file("attacks.py");
            std::fs::write(&script, ATTACKS).unwrap();
            let command = ["python3", script.to_str().unwrap(), &target];
            let said = site.run_with(&["sh", "-c", enter, "sh"], options, &command);
            assert_kept_out(&said.succeed(MOMENT * 3));
        }
    }
}

#[test]
fn second_mount_of_the_runtime_directory_is_covered() {
    require!(Need::Guests, Need::Root, Need::Program("python3", "python3"));
    let site = Site::of(None);
    let _bystander = site.bystander("");
    let (whole, part) = (site.lab.file("whole"), site.lab.file("part"));
    for directory in [&whole, &part] {
        std::fs::create_dir(directory).unwrap();
    }
    let mounts = format!(
        "mount --bind {0} {1} && mount --bind {0}/ringfence {2} && ls {1}/ringfence {2} >&2 && exec \"$@\"",
        site.session().display(),
        whole.display(),
        part.display()
    );
    let script = "look() { find . -name '*.sock'; }; look; umount whole part; look; echo end";
    let wrapper = ["unshare", "--mount", "sh", "-c", &mounts, "sh"];
    let guest = site.run_with(&wrapper, "", &["sh", "-c", script]);
    let finished = guest.finish(MOMENT);
    assert!(finished.stderr.matches("default.sock").count() == 2, "{}", finished.stderr);
    assert_eq!(finished.stdout, "end\n", "{}", finished.stderr);
}

#[test]
fn command_reaches_its_own_disks_and_nobody_elses() {
    require!(Need::Guests, Need::Program("python3", "python3"));
    for site in Site::all() {
        let other = site.bystander(&format!("--disk {}", site.image("other.img")));
        let path = crate::support::disks::socket_of(&site.lab, &other);
        let script = format!(
            "import os,socket
def connect(path):
    try:
        socket.socket(socket.AF_UNIX).connect(path)
        return 'connected'
    except OSError:
        return 'refused'
own = os.environ['RINGFENCE_DISK0']
print(connect(own), connect('{}'), os.listdir(os.path.dirname(own)))",
            path.display()
        );
        let options = format!("--disk {}", site.image("own.img"));
        let said = site.run(&options, &["python3", "-c", &script]).succeed(MOMENT);
        assert_eq!(said, "connected refused ['disk0']\n");
        assert!(!site.lab.runtime_dir().join("disk0").exists(), "the host has a path to a disk");
    }
}

/// Connects to every socket below the directories that are named, and prints those that answer as an NBD server does.
const FIND_DISKS: &str = "import os,socket,stat,sys,time
print('ready', flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
for top in sys.argv[2:]:
    for directory, _, names in os.walk(top):
        for name in names:
            path = os.path.join(directory, name)
            try:
                if stat.S_ISSOCK(os.lstat(path).st_mode):
                    client = socket.socket(socket.AF_UNIX)
                    client.settimeout(2)
                    client.connect(path)
                    if client.recv(8) == b'NBDMAGIC':
                        print(path)
            except OSError:
                pass
print('end')";

#[test]
fn disk_of_a_later_guest_with_another_runtime_directory_is_not_reached() {
    require!(Need::Guests, Need::Program("python3", "python3"));
    for site in Site::all() {
        let without = ["env", "--unset=XDG_RUNTIME_DIR"];
        for (attacker, victim) in [(&without[..], &[][..]), (&[][..], &without[..])] {
            let go = site.lab.file("go");
            let _ = std::fs::remove_file(&go);
            let places = [
                go,
                site.session(),
                "/run".into(),
                format!("/tmp/ringfence-{}", site.ids().0).into(),
            ];
            let find = places.iter().map(|path| path.to_str().unwrap());
            let find: Vec<&str> = ["python3", "-c", FIND_DISKS].into_iter().chain(find).collect();
            let attacker = site.run_with(attacker, "--switch none", &find);
            attacker.wait_for_output("ready");
            let options = format!("--switch none --disk {}", site.image("victim.img"));
            let script = "test -S $RINGFENCE_DISK0 && echo served && sleep 600";
            let victim = site.run_with(victim, &options, &["sh", "-c", script]);
            victim.wait_for_output("served");
            std::fs::write(&places[0], "").unwrap();
            assert_eq!(attacker.succeed(MOMENT), "ready\nend\n");
            victim.end();
        }
    }
}

#[test]
#[ignore = "long: many launches"]
fn command_that_locks_binds_and_unlinks_does_not_hinder_the_next_launch() {
    require!(Need::Guests, Need::Program("python3", "python3"));
    for site in Site::all() {
        let stays = site.bystander("");
        let script = format!(
            "import fcntl,os,socket,time
runtime = '{}'
for path in [runtime, os.path.dirname(runtime)]:
    fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX)
for name in os.listdir(runtime):
    os.unlink(runtime + '/' + name)
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(runtime + '/victim.sock')
listener.listen()
print('ready', flush=True)
listener.settimeout(600)
listener.accept()
print('stolen', flush=True)
time.sleep(600)",
            site.lab.runtime_dir().display()
        );
        let attacker = site.run("--switch attacker", &["python3", "-c", &script]);
        attacker.wait_for_output("ready");
        for switch in ["default", "victim"] {
            let options = format!("--switch {switch} --disk {}", site.image("victim.img"));
            assert_eq!(
                site.script(&options, "test -S $RINGFENCE_DISK0 && echo served"),
                "served\n"
            );
        }
        assert_eq!(attacker.stdout.text(), "ready\n");
        attacker.end();
        stays.end();
    }
}

#[test]
fn sockets_and_variables_of_the_host_are_there_only_on_request() {
    require!(Need::Guests, Need::Program("python3", "python3"));
    let script = "import os,socket,sys
def connect(address):
    try:
        socket.socket(socket.AF_UNIX).connect(address)
        return 'connected'
    except OSError:
        return 'refused'
print(*[connect(address.replace('@', '\\0')) for address in sys.argv[1:]])
print(*[os.environ.get(name, '-') for name in ['SSH_AUTH_SOCK', 'DBUS_SESSION_BUS_ADDRESS', 'DISPLAY', 'KEPT']])";
    for site in Site::all() {
        // One socket is in the session's directory, and the other is not.
        let (bus, agent) = (site.session().join("bus"), site.lab.file("agent"));
        let _listeners = [&bus, &agent].map(|path| {
            let listener = UnixListener::bind(path).unwrap();
            std::fs::set_permissions(path, PermissionsExt::from_mode(0o777)).unwrap();
            listener
        });
        let name = format!("ringfence-attack-{}", site.session().display());
        let _abstract =
            UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        let name = format!("@{name}");
        let command =
            ["python3", "-c", script, bus.to_str().unwrap(), agent.to_str().unwrap(), &name];
        let environment =
            ["env", "SSH_AUTH_SOCK=/a", "DBUS_SESSION_BUS_ADDRESS=b", "DISPLAY=:0", "KEPT=c"];
        let said = |options| site.run_with(&environment, options, &command).succeed(MOMENT);
        assert_eq!(said(""), "refused refused refused\n- - - c\n");
        // Abstract sockets belong to the host's network namespace, which the guest does not share.
        assert_eq!(said("--share-runtime"), "connected connected refused\n/a b :0 c\n");
    }
}

#[test]
fn kernel_settings_cannot_be_changed_by_the_command() {
    require!(Need::Guests, Need::Program("python3", "python3"));
    // Opening for writing is proof enough; the test must not change the kernel's settings.
    let script = "import ctypes,os
libc = ctypes.CDLL(None, use_errno=True)
files = ['/proc/sys/kernel/core_pattern', '/proc/sys/vm/drop_caches', '/proc/sysrq-trigger', '/proc/irq/default_smp_affinity',
    '/sys/kernel/mm/transparent_hugepage/enabled', '/sys/kernel/mm/ksm/run', '/sys/kernel/rcu_expedited', '/sys/power/state',
    '/sys/module/kernel/parameters/panic', '/dev/mem']
# The log may be written by the command of an ordinary user whom the host allows it.
if not os.path.exists('/dev/kmsg') or os.stat('/dev/kmsg').st_mode & 2 == 0 and os.getuid():
    files.append('/dev/kmsg')
def writable():
    found = []
    for path in files:
        try:
            os.close(os.open(path, os.O_WRONLY))
            found.append(path)
        except OSError:
            pass
    return found
def attempt(name, act):
    child = os.fork()
    if child == 0:
        try:
            act()
        except OSError:
            pass
        if writable():
            print(name, *writable(), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
def mount(source, target, kind, flags):
    libc.mount(source and source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), None)
def points():
    return [line.split()[4] for line in open('/proc/self/mountinfo')]
def unmount():
    for point in reversed(points()):
        libc.umount2(point.encode(), 2)
def remount():
    for point in points():
        mount(None, point, None, 32 | 4096)
        mount(None, point, None, 32)
def fresh(flags):
    def act():
        libc.unshare(flags)
        if os.fork() == 0:
            for target, kind in [('/proc', 'proc'), ('/sys', 'sysfs')]:
                mount(kind, target, kind, 0)
            if writable():
                print('fresh', *writable(), flush=True)
            os._exit(0)
        os.wait()
    return act
attempt('plain', lambda: None)
attempt('unmount', unmount)
attempt('remount', remount)
attempt('fresh', fresh(0x20000 | 0x20000000))
attempt('fresh user', fresh(0x10000000 | 0x20000 | 0x20000000))
attempt('fresh network', fresh(0x20000 | 0x20000000 | 0x40000000))
for name, result in [
    ('mknod', libc.mknod(b'scratch-device', 0o20666, os.makedev(1, 1))),
    ('module', libc.syscall(313, os.open('/dev/null', os.O_RDONLY), b'', 0) if ctypes.get_errno() != 8 else -1),
    ('reboot', libc.reboot(0)),
    ('swapoff', libc.swapoff(b'/nowhere')),
    ('time', libc.settimeofday(None, ctypes.byref((ctypes.c_int * 2)(0, 0)))),
]:
    if result != -1:
        print(name, flush=True)
try:
    with open('/proc/sys/net/ipv4/ip_forward', 'w') as file:
        file.write('1')
    print('own network')
except PermissionError:
    print('nothing')";
    for site in Site::all() {
        for options in ["", "--as-root"] {
            let guest = site.run(options, &["python3", "-c", script]);
            let is_root = site.ids().0 == 0 || options == "--as-root";
            let expected = if is_root { "own network\n" } else { "nothing\n" };
            assert_eq!(guest.succeed(MOMENT), expected, "{options}");
        }
    }
}

#[test]
fn run_by_root_prints_notice_that_command_is_root() {
    require!(Need::Guests, Need::Root);
    let said = |user| {
        let finished = Site::of(user).run("", &["true"]).finish(MOMENT);
        assert_eq!(finished.status, Some(0), "{}", finished.stderr);
        finished.stderr
    };
    assert!(said(None).contains("you are root, and so is the command"));
    assert!(!said(Some(USER)).contains("you are root"));
}

#[test]
fn paths_of_options_hold_against_the_command() {
    require!(Need::Guests, Need::Program("python3", "python3"));
    for site in Site::all() {
        let files = site.lab.file("tree");
        for directory in ["", "kept", "empty", "hidden"] {
            std::fs::create_dir_all(files.join(directory)).unwrap();
            let path = files.join(directory);
            std::fs::set_permissions(&path, PermissionsExt::from_mode(0o777)).unwrap();
            std::fs::write(path.join("file"), "content").unwrap();
            std::fs::set_permissions(path.join("file"), PermissionsExt::from_mode(0o666)).unwrap();
        }
        std::fs::write(files.join("secret"), "secret").unwrap();
        let tree = files.display();
        let options = format!(
            "--ro {tree} --rw {tree}/kept --tmpfs {tree}/empty --hide {tree}/hidden --hide {tree}/secret"
        );
        let look = format!(
            "cd {tree}; (echo x > file) 2>&- && echo wrote; (echo x > kept/file) 2>&- && echo kept; \
             cat empty/file hidden/file secret 2>&-; cat file"
        );
        let attack = "mount -o remount,rw . ; mount -o remount,rw,bind .; for i in 1 2 3; do \
                      for p in empty hidden secret kept .; do umount -l $p; umount $(pwd)/$p; done; done";
        let script = format!("{look}; cd {tree}; ({attack}) 2>&-; {look}");
        assert_eq!(site.script(&options, &script), "kept\ncontentkept\ncontent");
    }
}

#[test]
fn read_only_root_directory_leaves_exceptions_writable() {
    require!(Need::Guests);
    for site in Site::all() {
        let files = site.lab.file("tree");
        for directory in ["", "kept"] {
            let path = files.join(directory);
            std::fs::create_dir_all(&path).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(0o777)).unwrap();
        }
        let tree = files.display();
        // The devices of the guest, not of the host: /sys is the guest's own.
        let devices = r#"a=$(ls /sys/class/net | sort)
            b=$(sed -n 's/^ *\([a-z0-9]*\):.*/\1/p' /proc/net/dev | sort)
            test "$a" = "$b" && echo x > /dev/null && echo devices"#;
        let script = format!(
            "(echo x > {tree}/file) 2>&- || echo refused; echo x > {tree}/kept/file && echo kept; {devices}"
        );
        let said =
            site.run(&format!("--ro / --rw {tree}/kept"), &["sh", "-c", &script]).finish(MOMENT);
        assert_eq!(said.status, Some(0), "{}", said.stderr);
        assert_eq!(
            said.stdout.split_whitespace().collect::<Vec<_>>(),
            ["refused", "kept", "devices"]
        );
        assert!(!said.stderr.contains("cannot be mounted"), "{}", said.stderr);
    }
}

#[test]
fn command_with_another_root_directory_does_not_reach_the_old_one() {
    require!(Need::Guests, Need::Program("busybox", "busybox"));
    for site in Site::all() {
        let root = site.lab.file("root");
        for directory in ["dev", "proc", "sys", "run", "bin", "tmp", "etc"] {
            std::fs::create_dir_all(root.join(directory)).unwrap();
        }
        let script = "b=$(command -v busybox); for f in $(ldd $b | grep -o '/[^ ]*'); do \
                      mkdir -p $1$(dirname $f); cp -L $f $1$f; done; cp $b $1/bin/busybox; \
                      for a in sh ls umount test; do ln -s busybox $1/bin/$a; done";
        let made = Command::new("sh").args(["-c", script, "sh", root.to_str().unwrap()]).status();
        assert!(made.unwrap().success());
        std::fs::write(site.lab.file("outside"), "").unwrap();
        let outside = site.lab.file("outside");
        let (path, disk) = (outside.display(), site.image("root.img"));
        let script = format!(
            "ls /; test -S $RINGFENCE_DISK0 && echo disk; cd /; umount -l /; umount -l .; \
             ls -d {path} /../{path} /proc/*/root{path}; \
             while read -r _ _ _ _ at _; do ls -d $at{path}; done < /proc/self/mountinfo; \
             test -c /dev/null && echo end"
        );
        let options = format!("--as-root --root {} --disk {disk}", root.display());
        let guest = site.run(&options, &["/bin/sh", "-c", &script]);
        let finished = guest.finish(MOMENT);
        let words: Vec<&str> = finished.stdout.split_whitespace().collect();
        assert!(words.contains(&"etc") && !words.contains(&"home"), "{words:?}");
        assert_eq!(words[words.len() - 2..], ["disk", "end"], "{}", finished.stderr);
    }
}

#[test]
fn directory_without_a_session_exists_before_the_command_can_make_it() {
    require!(Need::Guests, Need::Root);
    /// User id that only this test uses.
    const OTHER: u32 = 12346;
    let site = Site::of(Some(OTHER));
    let directory = PathBuf::from(format!("/tmp/ringfence-{OTHER}"));
    let _ = std::fs::remove_dir_all(&directory);
    let script = format!("mkdir -p {0}; touch {0}/default.sock && echo made", directory.display());
    assert_eq!(site.script("", &script), "made\n");
    let left: Vec<_> = std::fs::read_dir(&directory).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
    std::fs::remove_dir(&directory).unwrap();
}

#[test]
fn disks_of_launchers_with_one_process_id_are_kept_apart() {
    require!(Need::Guests, Need::Root);
    let site = Site::of(None);
    let wrapper =
        ["unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", "\"$@\"; exit $?", "sh"];
    let start = |image: &str| {
        let path = site.image(image);
        std::fs::write(&path, vec![if image == "first.img" { 1 } else { 2 }; 1 << 20]).unwrap();
        let options = format!("--disk {path}");
        let script = "echo up $RINGFENCE_DISK0; test -S $RINGFENCE_DISK0; sleep 600";
        let guest = site.run_with(&wrapper, &options, &["sh", "-c", script]);
        guest.wait_for_output("up ");
        guest
    };
    let (first, second) = (start("first.img"), start("second.img"));
    let read = |guest: &crate::support::Running| {
        let path = crate::support::disks::socket_of(&site.lab, guest);
        let address = NbdAddress::Unix { path, name: String::new(), tls: None };
        let disk = NbdDisk::open(&address, &NbdOptions::default()).unwrap();
        Driver::new(disk.queue(1).unwrap()).read(0, 4096).unwrap()[0]
    };
    assert_eq!([read(&first), read(&second)], [1, 2], "each guest has its own disk");
}

#[test]
fn missing_host_facility_is_named_in_error() {
    require!(Need::Guests);
    let program = env!("CARGO_BIN_EXE_ringfence");
    let shell = |script: &str, wrapper: &[&str]| {
        let words = [wrapper, &["sh", "-c", script, "sh", program]].concat();
        let output = Command::new(words[0]).args(&words[1..]).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (status, said) = shell("exec \"$1\" --version > /dev/full", &[]);
    assert_eq!(status, Some(125), "{said}");
    assert!(said.contains("standard output: No space left"), "{said}");
    let (status, said) = shell("ulimit -s 64; exec \"$1\" run -- true", &[]);
    assert_eq!(status, Some(125), "{said}");
    assert!(said.contains("the limit of the stack is 64 KiB"), "{said}");
    let (status, said) = shell("ulimit -n 32; exec \"$1\" run -- true", &[]);
    assert_eq!(status, Some(125), "{said}");
    assert!(said.contains("the hard limit of open files is 32"), "{said}");
    let script = "mount -t tmpfs none /proc; exec \"$1\" run -- true";
    let (status, said) = shell(script, &["unshare", "--user", "--map-root-user", "--mount"]);
    assert_eq!(status, Some(125), "{said}");
    assert!(said.contains("/proc is not mounted"), "{said}");
}

/// Command that sends descriptors until the kernel refuses, prints the number in transit and stays.
const IN_TRANSIT: &str = "
import array, resource, socket, sys, time
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
count, pairs = 0, []
try:
    while True:
        pairs.append(socket.socketpair())
        for _ in range(8):
            rights = array.array('i', [pairs[-1][0].fileno()] * 250)
            pairs[-1][0].sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            count += 250
except OSError as error:
    print(f'in transit: {count} {error.errno}', flush=True)
time.sleep(600)
";

#[test]
#[ignore = "long: thousands of descriptors"]
fn command_with_many_descriptors_in_transit_does_not_keep_other_guests_from_attaching() {
    /// Error of a message with more descriptors than the sender may have in transit.
    const ETOOMANYREFS: &str = "109";
    require!(Need::Guests, Need::Program("python3", "python3"));
    for site in Site::all() {
        let limited = ["prlimit", "--nofile=1024:8192"];
        let attacker = site.run_with(&limited, "--switch s", &["python3", "-c", IN_TRANSIT]);
        attacker.wait_for_output("in transit:");
        let said = attacker.stdout.text();
        if site.wrapper.is_empty() && rustix::process::geteuid().is_root() {
            // Root's guests have host users of their own, so nothing is shared.
        } else {
            assert!(said.contains(ETOOMANYREFS), "{said}");
        }
        let other = site.run_with(&limited, "--switch s", &["sh", "-c", "ulimit -Hn; ulimit -Sn"]);
        assert_eq!(other.succeed(MOMENT), "6144\n1024\n");
        attacker.end();
    }
}
