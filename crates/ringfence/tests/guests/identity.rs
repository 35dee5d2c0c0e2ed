//! Ids and capabilities of the command: the user's own by default, root inside with `--as-root`.

use std::os::unix::fs::MetadataExt;

use crate::require;
use crate::support::needs::{Need, skip_what_is_not_installed};
use crate::support::users::{Site, USER};
use crate::support::{Finished, MOMENT, eventually};

/// Shell script that prints uid, gid and effective capabilities of the command.
const IDS: &str = "id -u; id -g; sed -n 's/CapEff:\t//p' /proc/self/status";

/// Returns the words of uid, gid and no capability.
fn without_capabilities(site: &Site) -> Vec<String> {
    let (uid, gid) = site.ids();
    vec![uid.to_string(), gid.to_string(), "0".repeat(16)]
}

fn words(said: &str) -> Vec<String> {
    said.split_whitespace().map(str::to_owned).collect()
}

/// Returns the site of a user who is not root.
fn ordinary() -> Site {
    Site::of(rustix::process::geteuid().is_root().then_some(USER))
}

/// Runs this program as the site's user.
fn command(site: &Site, arguments: &[&str]) -> Finished {
    let wrapper = site.wrapper.iter().map(String::as_str);
    let words: Vec<&str> =
        wrapper.chain([site.lab.program()]).chain(arguments.iter().copied()).collect();
    site.lab.spawn(&words).finish(MOMENT)
}

#[test]
fn command_of_an_ordinary_user_has_its_own_ids_and_no_capability() {
    require!(Need::Guests, Need::Program("setpriv", "util-linux"));
    let site = ordinary();
    let said = words(&site.script("", &format!("{IDS}; touch mine; stat -c %u mine")));
    let mut expected = without_capabilities(&site);
    expected.push(site.ids().0.to_string());
    assert_eq!(said, expected);
    assert_eq!(site.lab.file("mine").metadata().unwrap().uid(), site.ids().0);
    let said = site.script("", "cat /proc/self/uid_map; cat /proc/self/setgroups");
    assert_eq!(words(&said), [&site.ids().0.to_string(), "0", "1", "deny"]);
}

#[test]
fn command_with_as_root_is_root_inside_and_the_user_outside() {
    require!(Need::Guests, Need::Program("setpriv", "util-linux"));
    let site = ordinary();
    let said = words(&site.script("--as-root", &format!("{IDS}; touch mine; stat -c %u mine")));
    assert_eq!(said[..2], ["0", "0"]);
    let capabilities = u64::from_str_radix(&said[2], 16).unwrap();
    assert!(capabilities & (1 << 12) != 0, "CAP_NET_ADMIN: {said:?}");
    assert_eq!(said[3], "0");
    assert_eq!(site.lab.file("mine").metadata().unwrap().uid(), site.ids().0);
}

#[test]
fn command_of_root_is_root_with_and_without_as_root() {
    require!(Need::Guests, Need::Root);
    let site = Site::of(None);
    let (plain, as_root) = (site.script("", IDS), site.script("--as-root", IDS));
    assert_eq!(plain, as_root);
    assert!(plain.starts_with("0\n0\n"), "{plain}");
}

#[test]
fn user_of_the_command_has_name_and_home_of_the_host() {
    require!(Need::Guests, Need::Root, Need::Program("python3", "python3"));
    /// User `daemon` of every system.
    const DAEMON: u32 = 1;
    let site = Site::of(Some(DAEMON));
    // As ssh and git do without HOME: by the entry of the user's id.
    let script =
        "env -u HOME python3 -c 'import os.path; print(os.path.expanduser(\"~\"))'; id -un";
    let on_host = command_on_host(&site, script);
    assert!(on_host.ends_with("daemon\n"), "{on_host}");
    assert_eq!(site.script("", script), on_host);
    assert_ne!(site.script("--as-root", script), on_host);
}

fn command_on_host(site: &Site, script: &str) -> String {
    let wrapper = site.wrapper.iter().map(String::as_str);
    let words: Vec<&str> = wrapper.chain(["sh", "-c", script]).collect();
    site.lab.spawn(&words).succeed(MOMENT)
}

#[test]
fn command_without_capabilities_pings_and_listens_at_low_ports() {
    require!(Need::Guests, Need::Program("python3", "python3"));
    let script = "import socket
server = socket.socket()
server.bind(('0.0.0.0', 80))
server.listen()
client = socket.create_connection(('127.0.0.1', 80))
print('port 80')
ping = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP)
ping.settimeout(10)
ping.sendto(bytes([8, 0, 0, 0, 0, 0, 0, 1]), ('127.0.0.1', 0))
print('answer', ping.recv(100)[0])
try:
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    print('raw socket')
except PermissionError:
    print('no raw socket')";
    let site = ordinary();
    let said = site.run("", &["python3", "-c", script]).succeed(MOMENT);
    assert_eq!(said, "port 80\nanswer 0\nno raw socket\n");
    let said = site.run("--as-root", &["python3", "-c", script]).succeed(MOMENT);
    assert_eq!(said, "port 80\nanswer 0\nraw socket\n");
}

#[test]
fn exec_runs_with_ids_and_namespaces_of_the_guest() {
    require!(Need::Guests);
    let namespaces = "for i in user mnt net pid ipc uts; do readlink /proc/self/ns/$i; done";
    for options in ["", "--as-root"] {
        let site = ordinary();
        let script = format!("{{ {IDS}; {namespaces}; }} > seen; mv seen up; sleep 1000");
        let guest = site.run(&format!("-q --name web {options}"), &["sh", "-c", &script]);
        assert!(eventually(MOMENT, || site.lab.file("up").exists()));
        let script = format!("{IDS}; {namespaces}");
        let seen = command(&site, &["exec", "web", "--", "sh", "-c", &script]);
        assert_eq!(seen.stdout, site.lab.read("up"), "{options}: {}", seen.stderr);
        guest.end();
    }
}

/// Attempts of a command to leave its ids or to reach init.
const ESCAPES: &str = "
import ctypes, fcntl, os
libc = ctypes.CDLL(None, use_errno=True)
NEWNS, NEWUSER, NEWNET = 0x20000, 0x10000000, 0x40000000
def attempt(name, act):
    try:
        reached = act()
    except OSError:
        reached = False
    if reached:
        print(name, reached, flush=True)
def call(function, *arguments):
    result = getattr(libc, function)(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), 'failed')
    return True
def enter(path):
    return call('setns', os.open(path, os.O_RDONLY), 0)
for name in ['user', 'mnt', 'net', 'pid']:
    attempt('own ' + name, lambda: enter('/proc/self/ns/' + name))
    attempt('init ' + name, lambda: enter('/proc/1/ns/' + name))
# NS_GET_USERNS and NS_GET_PARENT.
attempt('owner of the network', lambda: fcntl.ioctl(os.open('/proc/self/ns/net', os.O_RDONLY), 0xb701))
attempt('parent namespace', lambda: fcntl.ioctl(os.open('/proc/self/ns/user', os.O_RDONLY), 0xb702))
attempt('trace init', lambda: call('ptrace', 16, 1, 0, 0))
attempt('memory of init', lambda: os.open('/proc/1/mem', os.O_RDWR))
attempt('descriptors of init', lambda: [os.readlink('/proc/1/fd/' + fd) for fd in os.listdir('/proc/1/fd')])
attempt('files of init', lambda: [os.open('/proc/1/fd/' + fd, os.O_RDONLY) for fd in os.listdir('/proc/1/fd')])
attempt('root of init', lambda: os.listdir('/proc/1/root/'))
attempt('become root', lambda: call('setuid', 0))
attempt('mount', lambda: call('mount', b'none', b'/tmp', b'tmpfs', 0, None))
attempt('unmount', lambda: call('umount2', b'/etc/resolv.conf', 2))
attempt('unmount /proc', lambda: call('umount2', b'/proc', 2))
attempt('host name', lambda: call('sethostname', b'x', 1))
attempt('new network', lambda: call('unshare', NEWNET))
def inside():
    call('unshare', NEWUSER | NEWNS)
    for file, text in [('uid_map', f'0 {uid} 1'), ('gid_map', f'0 {gid} 1')]:
        open('/proc/self/' + file, 'w').write(text)
    for path in [b'/etc/resolv.conf', b'/proc', b'/sys']:
        attempt('locked mount', lambda: call('umount2', path, 2))
    attempt('network of the guest', lambda: enter('/proc/self/ns/net'))
    attempt('host name in a namespace', lambda: call('sethostname', b'x', 1))
uid, gid = os.getuid(), os.getgid()
attempt('user namespace', inside)
print('done')";

#[test]
fn command_without_capabilities_does_not_leave_its_ids() {
    require!(Need::Guests, Need::Program("python3", "python3"));
    let site = ordinary();
    let options = "--uplink host --uplink-address 192.0.2.2/24 --uplink-gateway 192.0.2.1";
    let said = site.run(options, &["python3", "-c", ESCAPES]).succeed(MOMENT);
    assert_eq!(said, "done\n");
}

#[test]
fn disk_is_served_to_a_command_with_the_users_own_ids() {
    require!(Need::Guests, Need::Program("python3", "python3"));
    let script = "import os,socket
disk = socket.socket(socket.AF_UNIX)
disk.connect(os.environ['RINGFENCE_DISK0'])
print(os.getuid(), disk.recv(8).decode())";
    let site = ordinary();
    let options = format!("--disk {}", site.image("disk.img"));
    let said = site.run(&options, &["python3", "-c", script]).succeed(MOMENT);
    assert_eq!(said, format!("{} NBDMAGIC\n", site.ids().0));
}

#[test]
fn guest_in_a_guest_starts_with_and_without_as_root() {
    require!(Need::Guests, Need::Program("unshare", "util-linux"));
    let site = ordinary();
    let (uid, program) = (site.ids().0.to_string(), site.lab.program());
    let inner = |options: &str| format!("{program} run -q --uplink none {options} -- id -u");
    for (options, script, expected) in [
        ("", inner(""), uid.as_str()),
        ("", inner("--as-root"), "0"),
        ("--as-root", inner(""), "0"),
        ("", format!("unshare -r {}", inner("")), "0"),
        ("--as-root", format!("env -u XDG_RUNTIME_DIR {}", inner("")), "0"),
        ("", format!("{} run -q --uplink none -- {}", program, inner("")), &uid),
    ] {
        let said = site.run(options, &["sh", "-c", &script]).succeed(MOMENT * 2);
        assert_eq!(said.trim(), expected, "{options}: {script}");
    }
    // In a PID namespace that sees the /proc of outside, as in pasta.
    let said = command_on_host(&site, &format!("unshare -r --pid --fork {}", inner("")));
    assert_eq!(said.trim(), "0");
    // Without a guest around it. Root of a user namespace cannot write to /run.
    for script in ["", "env -u XDG_RUNTIME_DIR "] {
        let said = command_on_host(&site, &format!("{script}unshare -r {}", inner("")));
        assert_eq!(said.trim(), "0");
    }
}

/// Filter of seccomp that refuses sethostname(2) on x86-64, as Podman's and Docker's lists do in a container without
/// `CAP_SYS_ADMIN`: load the number; is it 170?; EPERM; allow.
#[cfg(target_arch = "x86_64")]
const NO_HOST_NAME: [(u16, u8, u8, u32); 4] =
    [(0x20, 0, 0, 0), (0x15, 0, 1, 170), (0x06, 0, 0, 0x0005_0001), (0x06, 0, 0, 0x7FFF_0000)];

#[test]
#[cfg(target_arch = "x86_64")]
fn guest_in_a_container_with_seccomp_list_says_what_to_set() {
    require!(Need::Guests);
    if let Some(why) = Need::Program("bwrap", "bubblewrap").missing() {
        return skip_what_is_not_installed(&why);
    }
    let site = ordinary();
    let list: Vec<u8> = NO_HOST_NAME
        .iter()
        .flat_map(|(code, yes, no, k)| {
            [&code.to_le_bytes()[..], &[*yes, *no], &k.to_le_bytes()].concat()
        })
        .collect();
    let file = site.lab.file("seccomp");
    std::fs::write(&file, list).unwrap();
    let script = format!(
        "exec 9<{}; exec bwrap --seccomp 9 --dev-bind / / --proc /proc --unshare-all \"$@\"",
        file.display()
    );
    let failed = site.run_with(&["sh", "-c", &script, "sh"], "-q", &["true"]).finish(MOMENT);
    assert_eq!(failed.status, Some(125));
    for expected in ["--cap-add SYS_ADMIN", "seccomp=unconfined", "--device /dev/net/tun"] {
        assert!(failed.stderr.contains(expected), "{}", failed.stderr);
    }
}

#[test]
fn unknown_command_is_not_found_also_beside_directory_that_cannot_be_searched() {
    require!(Need::Guests);
    let site = ordinary();
    let run = format!("PATH=$closed:$PATH {} run -q --uplink none --", site.lab.program());
    let script = format!(
        "closed=$(mktemp -d) && touch $closed/inside && chmod 0 $closed; {run} no-such-command; echo $?; \
         {run} /etc/passwd; echo $?; chmod 700 $closed; {run} inside; echo $?; rm -r $closed"
    );
    let said = command_on_host(&site, &script);
    assert_eq!(said.split_whitespace().collect::<Vec<_>>(), ["127", "126", "126"]);
}

#[test]
fn guest_in_a_sandbox_of_bubblewrap_starts_or_says_which_device_it_lacks() {
    require!(Need::Guests);
    if let Some(why) = Need::Program("bwrap", "bubblewrap").missing() {
        return skip_what_is_not_installed(&why);
    }
    let site = ordinary();
    let sandbox = ["bwrap", "--dev-bind", "/", "/", "--proc", "/proc", "--unshare-all"];
    let said = site.run_with(&sandbox, "-q", &["id", "-u"]).succeed(MOMENT);
    assert_eq!(said.trim(), site.ids().0.to_string());
    let own_devices: Vec<&str> = sandbox.iter().copied().chain(["--dev", "/dev"]).collect();
    let failed = site.run_with(&own_devices, "-q", &["true"]).finish(MOMENT);
    assert_eq!(failed.status, Some(125));
    assert!(failed.stderr.contains("--dev-bind /dev/net/tun /dev/net/tun"), "{}", failed.stderr);
    // Root of the sandbox without capabilities: the kernel lets it map no id.
    let root: Vec<&str> = sandbox.iter().copied().chain(["--uid", "0", "--gid", "0"]).collect();
    let failed = site.run_with(&root, "-q", &["true"]).finish(MOMENT);
    assert_eq!(failed.status, Some(125));
    assert!(failed.stderr.contains("--cap-add ALL"), "{}", failed.stderr);
    let capable: Vec<&str> = root.iter().copied().chain(["--cap-add", "ALL"]).collect();
    let said = site.run_with(&capable, "-q", &["id", "-u"]).succeed(MOMENT);
    assert_eq!(said.trim(), "0");
}
