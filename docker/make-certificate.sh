#!/bin/sh
# Makes a self-signed certificate for trying the server behind nginx on this machine:
#
#     docker/make-certificate.sh [FOLDER [NAME...]]
#
# FOLDER (docker/tls) gets certificate.pem and key.pem, for localhost, 127.0.0.1, ::1 and each NAME.
# Other machines do not trust it: curl accepts it with --cacert FOLDER/certificate.pem, a browser
# warns. The script never overwrites an existing file. A real certificate: see docs/OPERATIONS.md.
set -eu

folder=${1-$(dirname "$0")/tls}
[ $# -eq 0 ] || shift
names=DNS:localhost,IP:127.0.0.1,IP:::1
for name; do
    case $name in
        *[!A-Za-z0-9.*-]*) echo "make-certificate: $name is no host name" >&2; exit 2 ;;
    esac
    names=$names,DNS:$name
done
command -v openssl >/dev/null || {
    echo "make-certificate: needs openssl; on Debian: apt-get install openssl" >&2
    exit 1
}
mkdir -p "$folder"
for file in certificate.pem key.pem; do
    if [ -e "$folder/$file" ]; then
        echo "make-certificate: $folder/$file is there already; remove it to make a new one" >&2
        exit 1
    fi
done
umask 077
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -sha256 -days 90 \
    -subj /CN=localhost -addext "subjectAltName=$names" \
    -addext basicConstraints=critical,CA:FALSE -addext extendedKeyUsage=serverAuth \
    -keyout "$folder/key.pem" -out "$folder/certificate.pem" 2>/dev/null
chmod 644 "$folder/certificate.pem"
echo "made $folder/certificate.pem and $folder/key.pem, valid for 90 days"
