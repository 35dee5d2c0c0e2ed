//! Presets with the clients for which they are: each fetches from a stand-in for its registries, and nothing from another host.

use crate::support::egress::{DNSMASQ, LONG, OPENSSL, THIRD_V4};
use crate::support::eventually;
use crate::support::needs::{Need, skip_what_is_not_installed};
use crate::{net, require};

/// Client of the registries of a preset.
struct Client {
    preset: &'static str,
    needs: &'static [Need],
    /// Hosts that it asks.
    hosts: &'static [&'static str],
    command: &'static str,
}

const APT: Client = Client {
    preset: "ubuntu",
    needs: &[Need::Program("apt-get", "apt")],
    hosts: &["archive.ubuntu.com"],
    command: "mkdir -p apt/state/lists/partial apt/cache/archives/partial
        echo 'deb [trusted=yes] http://archive.ubuntu.com/apt ./' > ubuntu.list
        apt() { apt-get -qq -o Dir::State=$PWD/apt/state -o Dir::Cache=$PWD/apt/cache -o Dir::Etc::sourcelist=$PWD/ubuntu.list \
            -o Dir::Etc::sourceparts=/dev/null -o APT::Sandbox::User=root -o Acquire::Retries=0 \
            -o APT::Update::Error-Mode=any \"$@\"; }
        apt update && apt download tiny && ls tiny_1.0_all.deb",
};

const PIP: Client = Client {
    preset: "pypi",
    needs: &[Need::Program("pip", "python3-pip")],
    hosts: &["pypi.org", "files.pythonhosted.org"],
    command: "env -u PIP_FIND_LINKS -u PIP_CERT -u REQUESTS_CA_BUNDLE -u CURL_CA_BUNDLE PIP_CONFIG_FILE=/dev/null \
        pip download -q --retries 0 --no-cache-dir --no-deps --disable-pip-version-check --cert cert.pem \
        --index-url https://pypi.org/simple -d wheels tiny && ls wheels/tiny-1.0-py3-none-any.whl",
};

const OTHERS: [Client; 8] = [
    Client {
        preset: "npm",
        needs: &[Need::Program("npm", "npm")],
        hosts: &["registry.npmjs.org"],
        command: "env -u npm_config_cafile -u NPM_CONFIG_CAFILE NODE_EXTRA_CA_CERTS=$PWD/cert.pem npm install --no-audit \
            --no-fund --no-update-notifier --fetch-retries 0 --prefix npm --cache npm/cache \
            --registry https://registry.npmjs.org/ tiny && ls npm/node_modules/tiny/package.json",
    },
    Client {
        preset: "crates",
        needs: &[Need::Program("cargo", "cargo")],
        hosts: &["index.crates.io", "static.crates.io"],
        command: "(cd rust && CARGO_HOME=$PWD/home CARGO_NET_RETRY=0 CARGO_HTTP_CAINFO=$PWD/../cert.pem \
            cargo fetch)",
    },
    Client {
        preset: "go",
        needs: &[Need::Program("go", "golang-go")],
        hosts: &["proxy.golang.org"],
        // The database of checksums signs its answers, so it has no stand-in.
        command: "(cd module && SSL_CERT_FILE=$PWD/../cert.pem GOPATH=$PWD/path GOFLAGS=-modcacherw GOTOOLCHAIN=local \
            GOSUMDB=off GOPROXY=https://proxy.golang.org go mod download tiny.test/tiny@v1.0.0)",
    },
    Client {
        preset: "maven",
        needs: &[Need::Program("mvn", "maven"), Need::Program("keytool", "default-jre-headless")],
        hosts: &["repo.maven.apache.org"],
        command: "keytool -importcert -noprompt -alias x -file cert.pem -keystore trust.p12 -storetype PKCS12 \
            -storepass changeit >keytool.log 2>&1
        mvn -q -B -Dmaven.repo.local=$PWD/m2 -Djavax.net.ssl.trustStore=$PWD/trust.p12 \
            -Djavax.net.ssl.trustStorePassword=changeit validate && ls m2/test/parent/1.0/parent-1.0.pom",
    },
    Client {
        preset: "docker",
        needs: &[Need::Program("skopeo", "skopeo")],
        hosts: &["registry-1.docker.io"],
        command: "mkdir certs && cp cert.pem certs/ca.crt && skopeo --policy policy.json copy -q --src-cert-dir certs \
            docker://docker.io/library/tiny:1 dir:image",
    },
    Client {
        preset: "rubygems",
        needs: &[Need::Program("gem", "ruby"), Need::Program("ruby", "ruby")],
        hosts: &["index.rubygems.org"],
        command: "HOME=$PWD SSL_CERT_FILE=$PWD/cert.pem gem install -q --no-document --install-dir gems tiny && \
            ls gems/gems/tiny-1.0",
    },
    Client {
        preset: "huggingface",
        needs: &[Need::Module("huggingface_hub", "huggingface_hub")],
        hosts: &["huggingface.co", "cdn-lfs.hf.co"],
        command: "HF_HOME=$PWD/hub HF_HUB_DISABLE_TELEMETRY=1 SSL_CERT_FILE=$PWD/cert.pem python3 -c 'import huggingface_hub as h; \
            print(open(h.hf_hub_download(\"test/tiny\", \"model.bin\")).read())' | grep -x weights",
    },
    // The library of pixi: conda itself is in no registry but its own.
    Client {
        preset: "conda",
        needs: &[Need::Module("rattler", "py-rattler")],
        hosts: &["conda.anaconda.org"],
        command: "HOME=$PWD SSL_CERT_FILE=$PWD/cert.pem python3 rattler_client.py && ls conda/share/tiny",
    },
];

/// Installs a package of conda-forge below `conda`.
const RATTLER_PY: &str = "
import asyncio
import rattler
async def main():
    records = await rattler.solve(['conda-forge'], ['tiny'], platforms=['noarch'], timestamp_policy='allow-missing')
    await rattler.install(records, 'conda', cache_dir='packages', show_progress=False)
asyncio.run(main())
";

/// Project whose parent is in the registry.
const CHILD_XML: &str = "<project xmlns=\"http://maven.apache.org/POM/4.0.0\"><modelVersion>4.0.0</modelVersion>\
    <parent><groupId>test</groupId><artifactId>parent</artifactId><version>1.0</version><relativePath/></parent>\
    <artifactId>child</artifactId><packaging>pom</packaging></project>";

/// Connects to a host that no preset has.
const DENIED: &str =
    "python3 -c 'import socket; socket.create_connection((\"a.test\", 443), 20)' 2>&1 | tail -n 1";

/// Runs clients whose programs are installed, each under its preset.
fn fetch(clients: &[Client]) {
    let net = net!();
    std::fs::write(net.world.file("mirror.py"), include_str!("../support/mirror.py")).unwrap();
    std::fs::write(net.world.file("pom.xml"), CHILD_XML).unwrap();
    std::fs::write(net.world.file("rattler_client.py"), RATTLER_PY).unwrap();
    let hosts = clients.iter().flat_map(|client| client.hosts);
    let names: Vec<String> = hosts.map(|host| format!("DNS:{host}")).collect();
    let prepare = format!(
        "python3 mirror.py prepare a.test
         ec='-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2'
         openssl req -x509 $ec -subj /CN=authority -keyout authority.key -out authority.pem 2>openssl.log
         openssl req -x509 $ec -CA authority.pem -CAkey authority.key -subj /CN=registries -addext subjectAltName={} \
             -addext basicConstraints=CA:FALSE -keyout key.pem -out server.pem 2>>openssl.log
         cat server.pem authority.pem > cert.pem",
        names.join(",")
    );
    net.world.host(&["sh", "-ec", &prepare]).succeed(LONG);
    let server = net.world.outside(&["python3", "mirror.py", "registries", THIRD_V4]);
    server.wait_for_output("listening");
    for Client { preset, needs, hosts, command } in clients {
        if let Some(reason) = needs.iter().find_map(|need| need.missing()) {
            skip_what_is_not_installed(&format!("{preset}: {reason}"));
            continue;
        }
        let script = format!("set +e; {command}; echo \"status $?\"; {DENIED}");
        let output = net.guest(&format!("--policy-preset {preset}"), &script);
        assert!(output.contains("status 0\n"), "{preset}: {output}");
        assert!(output.contains("gaierror"), "{preset}: {output}");
        let asked = || server.stdout.text();
        let are_asked = || hosts.iter().all(|host| asked().contains(&format!(" {host} /")));
        assert!(eventually(LONG, are_asked), "{preset}: {}", asked());
    }
    drop(server.end());
    net.end();
}

#[test]
fn apt_and_pip_fetch_from_the_hosts_of_their_presets_alone() {
    require!(OPENSSL, DNSMASQ, Need::Program("git", "git"), Need::Program("dpkg-deb", "dpkg"));
    fetch(&[APT, PIP]);
}

#[test]
#[ignore = "long: more clients"]
fn clients_fetch_from_the_hosts_of_their_presets_alone() {
    require!(OPENSSL, DNSMASQ, Need::Program("git", "git"), Need::Program("dpkg-deb", "dpkg"));
    fetch(&OTHERS);
}
