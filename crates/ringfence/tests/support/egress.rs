//! Outside network of the tests of egress policies: a name server, and servers at two addresses.

use std::time::Duration;

use super::needs::Need;
use super::world::{FAR_V4, Families, OUTSIDE_V4, World, dnsmasq};
use super::{Running, eventually};

/// Time limit for a complete guest.
pub const LONG: Duration = Duration::from_secs(90);
/// Second address outside. Only names that no rule allows lead to it.
pub const OTHER_V4: &str = "198.51.100.2";

/// Third address outside, of two names, at which no server runs yet.
pub const THIRD_V4: &str = "198.51.100.3";

/// Number of addresses of `many.test`.
pub const MANY: usize = 101;

pub const CURL: Need = Need::Program("curl", "curl");
pub const OPENSSL: Need = Need::Program("openssl", "openssl");
pub const DNSMASQ: Need = Need::Program("dnsmasq", "dnsmasq-base");

/// World with a name server and web servers outside.
pub struct Net {
    pub world: World,
    pub names: Running,
    pub servers: Running,
}

impl Net {
    /// Creates the world, or returns `None` if the machine allows none.
    pub fn new() -> Option<Net> {
        let world = World::new(Families::V4)?;
        std::fs::write(world.file("egress.py"), include_str!("egress.py")).unwrap();
        let prepare = format!(
            "for ip in {OTHER_V4} {THIRD_V4}; do ip addr add $ip/32 dev lo; done; ip addr add 169.254.169.254/32 dev lo; \
             openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=a.test \
             -addext subjectAltName=DNS:a.test,DNS:b.test,DNS:x.wild.test -keyout key.pem -out cert.pem 2>openssl.log"
        );
        world.outside(&["sh", "-ec", &prepare]).succeed(LONG);
        let many: String = (1..=MANY).map(|n| format!("203.0.113.{n} many.test\n")).collect();
        std::fs::write(world.file("many"), many).unwrap();
        let names = world.outside(&dnsmasq(
            &[OUTSIDE_V4, FAR_V4],
            &[
                "--log-queries",
                // A longer answer is incomplete in a datagram.
                "--edns-packet-max=1232",
                &format!("--addn-hosts={}", world.file("many").display()),
                "--cname=alias.test,real.example",
                &format!("--host-record=real.example,{FAR_V4}"),
                // Two names share an address. The third one has another, the others point into private ranges.
                &format!("--address=/a.test/{FAR_V4}"),
                &format!("--address=/b.test/{FAR_V4}"),
                &format!("--address=/wild.test/{FAR_V4}"),
                &format!("--address=/other.test/{OTHER_V4}"),
                &format!("--address=/c.test/{THIRD_V4}"),
                &format!("--address=/d.test/{THIRD_V4}"),
                "--address=/rebind.test/10.0.0.1",
                "--address=/metadata.test/169.254.169.254",
                // Stand-ins for the registries of presets.
                &format!("--address=/ubuntu.com/pypi.org/pythonhosted.org/npmjs.org/{THIRD_V4}"),
                &format!("--address=/crates.io/golang.org/maven.apache.org/docker.io/{THIRD_V4}"),
                &format!("--address=/rubygems.org/huggingface.co/hf.co/anaconda.org/{THIRD_V4}"),
            ],
        ));
        let servers = world.outside(&["python3", "egress.py", "serve", FAR_V4, OTHER_V4]);
        servers.wait_for_output("listening");
        let wait = "for i in $(seq 200); do ss -Hlun 'sport = :53' | grep -q . && exit 0; sleep 0.05; done; exit 1";
        world.outside(&["sh", "-c", wait]).succeed(LONG);
        world.name_servers(&[OUTSIDE_V4]);
        Some(Net { world, names, servers })
    }

    /// Runs a script in a guest with these options. Returns its output.
    pub fn guest(&self, options: &str, script: &str) -> String {
        self.world.lone_guest(options, script).succeed(LONG)
    }

    /// Runs `ringfence policy` with these words. Returns its output.
    pub fn policy(&self, words: &str) -> String {
        let program = [self.world.lab.program(), "policy"];
        let words: Vec<&str> = program.into_iter().chain(words.split(' ')).collect();
        self.world.host(&words).succeed(LONG)
    }

    /// Returns `true` if the name server received a query for a name.
    pub fn was_asked_for(&self, name: &str) -> bool {
        self.names.stderr.text().contains(name) || self.names.stdout.text().contains(name)
    }

    /// Waits until the name server has logged a query for a name.
    pub fn wait_for_question(&self, name: &str) {
        assert!(eventually(LONG, || self.was_asked_for(name)), "nobody asked for {name}");
    }

    pub fn end(self) {
        drop((self.names.end(), self.servers.end()));
    }
}

/// Creates the network, or returns from the test.
#[macro_export]
macro_rules! net {
    () => {
        match $crate::support::egress::Net::new() {
            Some(net) => net,
            None => return,
        }
    };
}
