#!/bin/sh
# Builds a Kubernetes control plane (and, with --node, everything a node needs) out of Debian's own source package.
#
#   build.sh DIRECTORY [--node]
#
# No image registry and no Go proxy are asked: the source package holds the whole upstream tree with its vendored
# modules. It takes 5 to 15 minutes of two cores and 3 GB of disk while it lasts; the binaries stay in DIRECTORY and are
# built once. Debian 12 as root only; anywhere else, hand the tests a KUBECONFIG.
set -eu

directory=$1
node=${2:-}
version=1.20.5+really1.20.2-1.1+deb12u1
wanted="cmd/kube-apiserver cmd/kube-controller-manager"
packages="golang-1.19-go etcd-server rsync openssl"
if [ "$node" = --node ]; then
    wanted="$wanted cmd/kube-scheduler cmd/kubelet"
    packages="$packages containerd runc containernetworking-plugins podman catatonit debootstrap"
fi
# Debian's own package of it cannot stand beside that of other vendors, so it is built where there is none.
command -v kubectl >/dev/null || wanted="$wanted cmd/kubectl"

missing=
for one in $wanted; do [ -x "$directory/${one#cmd/}" ] || missing="$missing $one"; done
command -v etcd >/dev/null || missing="$missing etcd"
[ -n "$missing" ] || exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "build.sh: needs root on Debian 12 to build$missing; set KUBECONFIG to the cluster to test against" >&2
    exit 1
fi
mkdir -p "$directory"
work=$directory/source
rm -rf "$work"
mkdir -p "$work/lists/partial" "$work/parts"
# This machine's own package sources, as sources of source packages.
for file in /etc/apt/sources.list.d/debian.sources; do
    [ -e "$file" ] && sed 's/^Types:.*/Types: deb-src/' "$file" > "$work/parts/debian.sources"
done
[ -s /etc/apt/sources.list ] && sed -n 's/^deb /deb-src /p' /etc/apt/sources.list > "$work/parts/debian.list"

apt-get update -qq
# The services of these packages are not wanted, only their programs.
printf '#!/bin/sh\nexit 101\n' > "$work/policy-rc.d"
if [ ! -e /usr/sbin/policy-rc.d ]; then
    install -m 755 "$work/policy-rc.d" /usr/sbin/policy-rc.d
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
fi
# shellcheck disable=SC2086
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages >/dev/null

cd "$work"
options="-o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts=$work/parts -o Dir::State::lists=$work/lists"
# shellcheck disable=SC2086
apt-get $options update -qq
# shellcheck disable=SC2086
apt-get $options source -qq --download-only "kubernetes=$version"
mkdir tree
tar xzf kubernetes_*.orig.tar.gz -C tree --strip-components=1
cd tree
# Only GOPATH mode builds this tree: in module mode the toolchain wants to rewrite go.mod.
mkdir -p .go/src/k8s.io
ln -s ../../.. .go/src/k8s.io/kubernetes
export GOPATH="$PWD/.go" PATH="/usr/lib/go-1.19/bin:$PATH" CGO_ENABLED=0 GOPROXY=off HOME="$work"
make WHAT="$wanted" KUBE_GIT_VERSION=v1.20.2 KUBE_GIT_COMMIT=debian KUBE_GIT_TREE_STATE=archive
for one in $wanted; do
    install -m 755 "_output/local/go/bin/${one#cmd/}" "$directory/.${one#cmd/}"
    mv "$directory/.${one#cmd/}" "$directory/${one#cmd/}"
done
cd /
rm -rf "$work"
